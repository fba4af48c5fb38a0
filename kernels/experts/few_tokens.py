"""The experts of a few tokens: each reads the matrices that it has chosen, row by row.

    inner[p] = gate(x[token] @ gate_up[e].T + bias[e])                     for each pair p of a token and its expert e
    out[token] = sum over its pairs: share[p] * (inner[p] @ down[e].T + bias[e])  +  sigmoid(factor) * shared[token]

product.py sorts pairs by expert, so that tokens share what is read, and fills a matrix instruction with zeros for each.
Few tokens have hardly an expert in common. Here a program takes whole rows of matrices in turn, and loads the next ones
while it multiplies. Sums are float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.early import early_options, starts_early, wait_for_launch
from rocm_attn.kernels.launch import only_launches, repeated_launches
from rocm_attn.kernels.model.gate import GateForm
from rocm_attn.kernels.model.matrix_rows import lines_of_tile, store_outputs, warps_of
from rocm_attn.kernels.tuning.tiles import next_power_of_2

# Rows of matrices that a program reads at a time for inner products, and programs of a processor. H200, decode steps of
# one request, 8 layers of a Qwen3-30B-A3B and of a Qwen3-Next: 490 and 620 us; by 2 rows and 8 programs 500 and 628; by
# product.py, with its sort and combine.py 565 and 722.
_LINES, _PROGRAMS = 4, 4
# The most elements that a program holds of x, or of the inner products of a token.
_MOST_ELEMENTS = 1 << 14


@triton.jit
def _lines_of(
    weight,
    expert,
    tile,
    element,
    CHOSEN: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    SIDES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The rows of a pair's matrix that a tile multiplies; zeros beyond the last pair's tiles."""
    TILES: tl.constexpr = (OUT + ROWS - 1) // ROWS
    pair = tile // TILES
    matrix = weight + tl.load(expert + pair, mask=pair < CHOSEN, other=0).to(tl.int64) * (SIDES * OUT * IN)
    own_tile = tl.where(pair < CHOSEN, tile % TILES, TILES)
    return lines_of_tile(matrix, own_tile, element, OUT, IN, SIDES, ROWS)


@triton.jit(do_not_specialize_on_alignment=["bias", "out"])
def _inner_products_kernel(
    x,
    weight,
    bias,
    expert,
    out,
    CHOSEN: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE: tl.constexpr,
    LINES: tl.constexpr,
    EARLY: tl.constexpr,
):
    SIDES: tl.constexpr = 1 if GATE is None else 2
    ROWS: tl.constexpr = LINES // SIDES
    TILES: tl.constexpr = (OUT + ROWS - 1) // ROWS
    program, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    element = tl.arange(0, BLOCK)
    wait_for_launch(EARLY)
    expert += token * CHOSEN
    coming = _lines_of(weight, expert, program, element, CHOSEN, OUT, IN, SIDES, ROWS)
    given = tl.load(x + token * IN + element, mask=element < IN, other=0.0).to(tl.float32)
    for tile in range(program, CHOSEN * TILES, tl.num_programs(0)):
        lines = coming
        next_tile = tile + tl.num_programs(0)
        coming = _lines_of(weight, expert, next_tile, element, CHOSEN, OUT, IN, SIDES, ROWS)
        pair = tile // TILES
        of_expert = bias
        if bias is not None:
            of_expert += tl.load(expert + pair).to(tl.int64) * (SIDES * OUT)
        of_pair = out + (token * CHOSEN + pair) * OUT
        store_outputs(lines, given, of_expert, of_pair, tile % TILES, OUT, GATE, ROWS)


@triton.jit(do_not_specialize_on_alignment=["bias", "share", "shared", "factor", "out"])
def _expert_sums_kernel(
    inner,
    weight,
    bias,
    expert,
    share,
    shared,
    factor,
    out,
    CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    IN: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    program, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    chosen, element = tl.arange(0, CHOSEN_BLOCK), tl.arange(0, BLOCK)
    is_chosen = chosen < CHOSEN
    is_element = is_chosen[:, None] & (element < IN)[None, :]
    pair = token * CHOSEN + chosen
    wait_for_launch(EARLY)
    of_pair = tl.load(expert + pair, mask=is_chosen, other=0).to(tl.int64)
    lines = weight + of_pair[:, None] * (WIDTH * IN) + element[None, :]
    coming = tl.load(lines + program * IN, mask=is_element, other=0.0)
    by = tl.load(share + pair, mask=is_chosen, other=0.0)
    given = tl.load(inner + pair[:, None] * IN + element[None, :], mask=is_element, other=0.0).to(tl.float32)
    given *= by[:, None]
    if shared is not None:
        of_shared = 1.0
        if factor is not None:
            of_shared = tl.sigmoid(tl.load(factor + token).to(tl.float32))
    for column in range(program, WIDTH, tl.num_programs(0)):
        rows = coming
        next_column = column + tl.num_programs(0)
        is_next = is_chosen[:, None] & (element < tl.where(next_column < WIDTH, IN, 0))[None, :]
        coming = tl.load(lines + next_column.to(tl.int64) * IN, mask=is_next, other=0.0)
        total = tl.sum(tl.sum(rows.to(tl.float32) * given, 1), 0)
        if bias is not None:
            total += tl.sum(by * tl.load(bias + of_pair * WIDTH + column, mask=is_chosen, other=0.0).to(tl.float32), 0)
        if shared is not None:
            total += of_shared * tl.load(shared + token * WIDTH + column).to(tl.float32)
        tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty))


_products, _sums = repeated_launches(_inner_products_kernel), repeated_launches(_expert_sums_kernel)


def fits(rows: int, num_in: int) -> bool:
    """True if a program holds these rows of x."""
    return next_power_of_2(rows) * next_power_of_2(num_in) <= _MOST_ELEMENTS


@only_launches
def launch_inner_products(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    expert: Tensor,
    out: Tensor,
    compute_units: int,
    gate: GateForm | None = None,
) -> None:
    """Writes the product of each token with the matrices of its experts.

    x:             [tokens, in], of one dtype with the others: float32, float16 or bfloat16
    weight:        [experts, out, in]; with a gate [experts, 2 * out, in], the gate's rows first
    bias:          [experts, out] or [experts, 2 * out]
    expert:        int32 [tokens, chosen]
    out:           [tokens * chosen, out], written
    compute_units: of the GPU
    All are contiguous; x, weight and expert begin at a multiple of 16 bytes.
    """
    (num_tokens, num_in), chosen, sides = x.shape, expert.shape[1], 1 if gate is None else 2
    num_out, early = out.shape[1], starts_early(x.device)
    assert len(out) == num_tokens * chosen
    assert weight.shape[1:] == (sides * num_out, num_in)
    assert fits(1, num_in)
    _check(x, weight, expert, bias, out)
    tiles, block = chosen * triton.cdiv(num_out, _LINES // sides), next_power_of_2(num_in)
    _products(x.dtype, bias is None, chosen, num_out, num_in, gate)(
        x.device,
        (min(tiles, triton.cdiv(_PROGRAMS * compute_units, num_tokens)), num_tokens, 1),
        x,
        weight,
        bias,
        expert,
        out,
        chosen,
        num_out,
        num_in,
        block,
        gate,
        _LINES,
        early,
        num_warps=warps_of(block),
        **early_options(early),
    )


@only_launches
def launch_expert_sums(
    inner: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    expert: Tensor,
    share: Tensor,
    shared: Tensor | None,
    factor: Tensor | None,
    out: Tensor,
    compute_units: int,
) -> None:
    """Writes the sum of each token's experts by its shares.

    inner:         [tokens * chosen, in], of one dtype with the others: float32, float16 or bfloat16
    weight:        [experts, width, in]
    bias:          [experts, width]
    expert, share: int32 and float32 [tokens, chosen]
    shared:        [tokens, width], added; None: there is none
    factor:        [tokens, 1], whose sigmoid multiplies shared; None: 1
    out:           [tokens, width], written
    compute_units: of the GPU
    All are contiguous; inner, weight and expert begin at a multiple of 16 bytes.
    """
    (num_tokens, chosen), (_, width, num_in) = expert.shape, weight.shape
    chosen_block, block, early = next_power_of_2(chosen), next_power_of_2(num_in), starts_early(inner.device)
    assert inner.shape == (num_tokens * chosen, num_in)
    assert share.shape == expert.shape
    assert share.dtype == torch.float32
    assert out.shape == (num_tokens, width)
    assert fits(chosen, num_in)
    _check(inner, weight, expert, bias, shared, factor, out)
    _sums(inner.dtype, bias is None, shared is None, factor is None, chosen, width, num_in)(
        inner.device,
        (min(width, triton.cdiv(_PROGRAMS * compute_units, num_tokens)), num_tokens, 1),
        inner,
        weight,
        bias,
        expert,
        share,
        shared,
        factor,
        out,
        chosen,
        chosen_block,
        width,
        num_in,
        block,
        early,
        num_warps=warps_of(chosen_block * block),
        **early_options(early),
    )


def _check(x: Tensor, weight: Tensor, expert: Tensor, *others: Tensor | None) -> None:
    """Asserts what is the same for both launches."""
    assert expert.dtype == torch.int32
    assert expert.is_contiguous()
    assert all(each is None or (each.is_contiguous() and each.dtype == x.dtype) for each in (x, weight, *others))
    assert all(each.data_ptr() % 16 == 0 for each in (x, weight, expert))
