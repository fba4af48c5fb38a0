"""The gates around a recurrence: those of its tokens, and those of its output. By a kernel, and by torch on a CPU."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.kernels.states.arguments import GatedForm


def gates(x: Tensor, y: Tensor | None, bias: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Decays, float32, of the shape of x, and the strengths of changes, float32 [T, heads].

        size = softplus(x + bias)        decay = factor * size        strength = sigmoid(y), or size

    x: [T, heads] or [T, heads * channels]; y: [T, heads] or None; bias: float32, of a row of x
    factor: float32 [heads] or [heads, 1]
    """
    if x.device.type == "cpu":
        # In float32 torch's functions give other bits in its vectors than in the elements that are left after them. The
        # other tokens decide in which ones a token's elements lie. In float64 both round to the same float32.
        size = F.softplus((x.float() + bias).double()).float()
        channels = x.shape[1] // factor.numel()
        decay = size * factor.view(-1, 1).expand(-1, channels).flatten()
        return decay, size if y is None else y.double().sigmoid().float()
    from rocm_attn.kernels.states.gates import launch_gates

    decay, strength = (torch.empty(len(x), width, device=x.device) for width in (x.shape[1], factor.numel()))
    launch_gates(x, y, bias, factor, decay, strength)
    return decay, strength


@dataclass(frozen=True, slots=True)
class RowGate:
    """The gate of a recurrence's output, and its norm over groups of a row.

    weight:     float32, of a group or of a row; None: nothing is normalised
    num_groups: of a row
    """

    weight: Tensor | None
    num_groups: int
    form: GatedForm


def gated_norm(
    rows: Tensor, gate: Tensor, row_gate: RowGate, skip: Tensor | None = None, v: Tensor | None = None
) -> Tensor:
    """[T, heads * dim], of the dtype of rows: rows + skip * v, normalised and gated.

    rows, v: [T, heads, dim]; gate: [T, heads * dim]; skip: float32 [heads, 1]
    """
    if rows.device.type == "cpu":
        return gated_norm_of_torch(rows, gate, row_gate, skip, v, lambda squares: squares.mean(-1, keepdim=True))
    from rocm_attn.kernels.states.gated_norm import launch_gated_norm

    out, given = torch.empty(gate.shape, dtype=rows.dtype, device=rows.device), rows if v is None else v
    launch_gated_norm(rows, gate, row_gate.weight, skip, given, out, num_groups=row_gate.num_groups, form=row_gate.form)
    return out


def gated_norm_of_torch(
    rows: Tensor,
    gate: Tensor,
    row_gate: RowGate,
    skip: Tensor | None,
    v: Tensor | None,
    mean: Callable[[Tensor], Tensor],
) -> Tensor:
    """Like gated_norm. mean: of squares [T, groups, elements], over the last dimension, which it keeps"""
    x = rows.float() if skip is None or v is None else torch.addcmul(rows.float(), skip, v.float())
    x, opened, form = x.flatten(1), gate.double(), row_gate.form
    opened = (F.silu(opened) if form.silu else opened.sigmoid()).float()
    if form.gate_first:
        x = x * opened
    if row_gate.weight is not None:
        groups = x.view(len(x), row_gate.num_groups, x.shape[1] // row_gate.num_groups)
        normed = groups * torch.rsqrt(mean(groups.square()) + form.eps)
        x = normed.flatten(1) * row_gate.weight.repeat(x.shape[1] // row_gate.weight.numel())
    return (x if form.gate_first else x * opened).to(rows.dtype)
