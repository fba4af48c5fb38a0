"""Gates of MLPs, by torch or by kernels, and products that are combined where they are made."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rocm_attn.machine.target import detect_target
from rocm_attn.models.gates import ClampedSwiGLU, Gate, GeGLU, ReluSquared, SwiGLU

if TYPE_CHECKING:
    from rocm_attn.kernels.model.gate import GateForm


def mixed(gate: Gate, both: Tensor) -> Tensor:
    """[rows, inner]: the inner products of an MLP, combined. both: [rows, 2 * inner], the gate's product first

    Without a gate there is one product.
    """
    if both.device.type == "cpu" or isinstance(gate, ReluSquared):
        return gate.mix(*both.chunk(len(gate.PRODUCTS), -1))
    from rocm_attn.kernels.model.gate import launch_gate

    out = torch.empty(both.shape[0], both.shape[1] // 2, dtype=both.dtype, device=both.device)
    launch_gate(both, out, _form(gate))
    return out


def multiplied_and_mixed(gate: SwiGLU | GeGLU | ClampedSwiGLU, x: Tensor, weight: Tensor) -> Tensor:
    """[rows, inner]: the products of x [rows, in] and weight [2 * inner, in], combined."""
    from rocm_attn.kernels.model.gated_rows import launch_gated_rows

    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    launch_gated_rows(x, weight, out, _form(gate))
    return out


def fill_a_gpu(x: Tensor, weight: Tensor) -> bool:
    """True if launch_gated_rows takes a GPU's x and weight, starts early, and has programs for most of the GPU.

    A BLAS is as fast otherwise, and a product of one row has a kernel of its own.
    """
    if x.dim() != 2 or x.dtype.itemsize != 2 or x.dtype != weight.dtype:
        return False
    from rocm_attn.kernels.early import starts_early
    from rocm_attn.kernels.model.gated_rows import MOST_ROWS, OUTPUTS, STEP

    programs, rest = divmod(weight.shape[0], 2 * OUTPUTS)
    fits = 1 < x.shape[0] <= MOST_ROWS and rest == x.shape[1] % STEP == 0
    lie_right = all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (x, weight))
    return fits and lie_right and starts_early(x.device) and 4 * programs >= 3 * _compute_units(x.device)


def _form(gate: SwiGLU | GeGLU | ClampedSwiGLU) -> GateForm:
    from rocm_attn.kernels.model.gate import CLAMPED, GELU, SILU, GateForm

    if isinstance(gate, ClampedSwiGLU):
        return GateForm(CLAMPED, gate.limit, gate.alpha)
    return GateForm(SILU if isinstance(gate, SwiGLU) else GELU)


@functools.cache
def _compute_units(device: torch.device) -> int:
    return detect_target(device).compute_units
