"""Gates of MLPs, by torch or by kernels, and products of a few rows, which are combined where they are made."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rocm_attn.kernels.tuning.expert_tiles import expert_tiles, tiles_of_fixed_bits
from rocm_attn.machine.target import Target, detect_target
from rocm_attn.models.gates import ClampedSwiGLU, Gate, GeGLU, ReluSquared, SwiGLU

if TYPE_CHECKING:
    from rocm_attn.kernels.experts.arguments import ProductArgs
    from rocm_attn.kernels.model.add_norm import NormedSum
    from rocm_attn.kernels.model.gate import GateForm


def mixed(gate: Gate, both: Tensor) -> Tensor:
    """[rows, inner]: the inner products of an MLP, combined. both: [rows, 2 * inner], the gate's product first

    Without a gate there is one product.
    """
    if both.device.type == "cpu" or isinstance(gate, ReluSquared):
        return gate.mix(*both.chunk(len(gate.PRODUCTS), -1))
    from rocm_attn.kernels.model.gate import launch_gate

    out = torch.empty(both.shape[0], both.shape[1] // 2, dtype=both.dtype, device=both.device)
    launch_gate(both, out, form_of(gate))
    return out


def multiplied_and_mixed(
    gate: SwiGLU | GeGLU | ClampedSwiGLU, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """[rows, inner]: the products of x [rows, in] and weight [2 * inner, in], combined."""
    return _by_few_rows(x, weight, bias, 1, form_of(gate))[0]


def multiplied_in_parts(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> Tensor:
    """[parts, rows, out], whose sum is x @ weight.T + bias: in x's dtype if there is one part, else float32."""
    return _by_few_rows(x, weight, bias, parts, None)


def _by_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, gate: GateForm | None) -> Tensor:
    from rocm_attn.kernels.model.few_rows import launch_few_rows

    num_out = len(weight) if gate is None else len(weight) // 2
    dtype = x.dtype if parts == 1 else torch.float32
    out = torch.empty(parts, len(x), num_out, dtype=dtype, device=x.device)
    launch_few_rows(x, weight, bias, out, target_of(x.device).compute_units, gate)
    return out


def multiplied_as_normed(row: NormedSum, weight: Tensor, bias: Tensor | None, gate: Gate | None = None) -> Tensor:
    """[1, out]: the product of a normalised row, which is made too; or its halves, combined."""
    from rocm_attn.kernels.model.normed_product import launch_normed_product

    num_out, form = len(weight) // (1 if gate is None else 2), None if gate is None else form_of(gate)
    out = torch.empty(1, num_out, dtype=weight.dtype, device=weight.device)
    launch_normed_product(row, weight, bias, out, target_of(weight.device).compute_units, form)
    return out


def lie_right(x: Tensor, weight: Tensor) -> bool:
    """True if x and a matrix lie as the kernels for one row and for a few take them."""
    are_whole = all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (x, weight))
    return x.dim() == 2 and x.dtype == weight.dtype and are_whole


def parts_of_few_rows(x: Tensor, weight: Tensor, num_out: int) -> int:
    """The parts that launch_few_rows has to cut a product of a GPU into, so that most of the GPU has programs.

    0: it does not take them, or a BLAS is as fast, or a product of one row has a kernel of its own. A BLAS does not
    start early, and is faster with many rows if some processors have two programs.
    num_out: outputs of the product; the matrix of a gate has two rows for each
    """
    from rocm_attn.kernels.early import starts_early
    from rocm_attn.kernels.model.few_rows import MOST_ROWS, OUTPUTS, STEP

    rows, num_in = len(x), weight.shape[1]
    programs, rest = divmod(num_out, OUTPUTS)
    if not 1 < rows <= MOST_ROWS or rest or x.dtype.itemsize != 2:
        return 0
    if not (lie_right(x, weight) and starts_early(x.device)):
        return 0
    units, parts = target_of(x.device).compute_units, 1
    while 10 * programs * parts < 7 * units:
        parts *= 2
    is_fast = num_out < len(weight) or rows <= MOST_ROWS // 2 or programs * parts <= units
    return parts if is_fast and num_in % (parts * STEP) == 0 else 0


def multiplied_in_one_order(x: Tensor, weight: Tensor, bias: Tensor | None, gate: Gate | None = None) -> Tensor:
    """[rows, out] on a GPU: x @ weight.T + bias, or its halves, combined. A row's bits depend on no other row.

    Kernels or tiles for many rows are used where they have the order of sums of those for a few; else one tile serves
    any number of rows.
    """
    from rocm_attn.kernels.backend import on_hopper
    from rocm_attn.kernels.experts.arguments import ProductArgs
    from rocm_attn.kernels.model.few_rows import MOST_ROWS, OUTPUTS, STEP

    x, form = x.contiguous(), None if gate is None else form_of(gate)
    if x.data_ptr() % 16:
        x = x.clone()
    num_out, num_in = len(weight) // (1 if gate is None else 2), weight.shape[1]
    # The choice depends on the matrix alone, and only then on the number of rows.
    has_two = on_hopper() and x.dtype.itemsize == 2 and lie_right(x, weight) and num_out % OUTPUTS == num_in % STEP == 0
    if has_two and 0 < len(x) <= MOST_ROWS:
        return _by_few_rows(x, weight, bias, 1, form)[0]
    out = torch.empty(len(x), num_out, dtype=x.dtype, device=x.device)
    multiply(ProductArgs.of_all(x, weight, bias, out, form), len(x), by_hopper=has_two, fixed=True)
    return out


def heads_multiplied_in_one_order(x: Tensor, weight: Tensor) -> Tensor:
    """[rows, heads, out] on a GPU: x [rows, heads, in] @ weight[head].T of each head, as of experts with equal parts.

    A row's bits depend on no other row.
    """
    from rocm_attn.kernels.experts.arguments import ProductArgs

    (rows, heads, _), device = x.shape, x.device
    indptr, drawn = rows * torch.arange(heads + 1, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    out = torch.empty(heads, rows, weight.shape[1], dtype=x.dtype, device=device)
    by_head = x.transpose(0, 1).contiguous().flatten(0, 1)
    args = ProductArgs(by_head, weight, None, out.flatten(0, 1), None, indptr, drawn, None)
    multiply(args, rows, by_hopper=args.suits_hopper, fixed=True)
    return out.transpose(0, 1)


def multiply(args: ProductArgs, rows: int, *, by_hopper: bool, fixed: bool) -> None:
    """Launches a product of rows with the matrices of their experts.

    rows:      of a group on average
    by_hopper: whether by the kernel for Hopper, which `args` then suit
    fixed:     whether a row's bits must not depend on `rows`
    """
    from rocm_attn.kernels.experts.product import launch_expert_product

    target = target_of(args.x.device)
    if by_hopper:
        # Not every release of Triton has the Gluon that it is written in.
        from rocm_attn.kernels.hopper.expert_product import launch_hopper_expert_product

        launch_hopper_expert_product(args, compute_units=target.compute_units)
    else:
        tiles_for = tiles_of_fixed_bits if fixed else expert_tiles
        launch_expert_product(args, tiles=tiles_for(target.arch, args.x.dtype, rows))


def form_of(gate: Gate) -> GateForm:
    """The form of a gate for kernels."""
    from rocm_attn.kernels.model.gate import CLAMPED, GELU, SILU, GateForm

    assert not isinstance(gate, ReluSquared), "it has one product"
    if isinstance(gate, ClampedSwiGLU):
        return GateForm(CLAMPED, gate.limit, gate.alpha)
    return GateForm(SILU if isinstance(gate, SwiGLU) else GELU)


@functools.cache
def target_of(device: torch.device) -> Target:
    """Returns detect_target(), without asking the driver again."""
    return detect_target(device)
