"""Sums the outputs of a token's experts by its shares, and the output of the MLP that every token takes.

    out[t] = sum over i: share[t, i] * parts[places[t * chosen + i]]  +  sigmoid(weight[t]) * shared[t]

A program has a block of a token's row. Sums are in float32, in the order of i.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.early import early_options, starts_early, wait_for_launch
from rocm_attn.kernels.launch import only_launches, repeated_launches

_BLOCK = 512


@triton.jit
def _combine_experts_kernel(
    parts,
    places,
    share,
    shared,
    weight,
    out,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for chosen in tl.static_range(CHOSEN):
        pair = token * CHOSEN + chosen
        place = pair
        if places is not None:
            place = tl.load(places + pair)
        part = tl.load(parts + place * WIDTH + column, mask=is_column, other=0.0).to(tl.float32)
        total += part * tl.load(share + pair)
    if shared is not None:
        of_all = tl.load(shared + token * WIDTH + column, mask=is_column, other=0.0).to(tl.float32)
        if weight is not None:
            of_all *= tl.sigmoid(tl.load(weight + token).to(tl.float32))
        total += of_all
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=is_column)


_variant = repeated_launches(_combine_experts_kernel)


@only_launches
def launch_combine(
    parts: Tensor, places: Tensor | None, share: Tensor, shared: Tensor | None, weight: Tensor | None, out: Tensor
) -> None:
    """Writes the sum of each token.

    parts:  float32, float16 or bfloat16 [tokens * chosen, width]
    places: int64 [tokens * chosen]: the row of parts of each pair; None: the same row
    share:  float32 [tokens, chosen]
    shared: [tokens, width], of the dtype of parts, or None
    weight: [tokens, 1], of that dtype; None: shared counts as it is
    out:    [tokens, width], of that dtype, written
    All are contiguous and begin at a multiple of 16 bytes.
    """
    num_tokens, width = out.shape
    chosen = share.shape[1]
    assert parts.shape == (num_tokens * chosen, width)
    assert share.shape[0] == num_tokens
    assert share.dtype == torch.float32
    assert places is None or (places.dtype == torch.int64 and len(places) == len(parts))
    given = [each for each in (parts, shared, weight, out) if each is not None]
    assert all(each.dtype == out.dtype for each in given)
    numbers = [share] if places is None else [share, places]
    assert all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (*given, *numbers))
    if num_tokens:
        early = starts_early(out.device)
        _variant(out.dtype, chosen, width, places is None, shared is None, weight is None)(
            out.device,
            (num_tokens, triton.cdiv(width, _BLOCK), 1),
            parts,
            places,
            share,
            shared,
            weight,
            out,
            chosen,
            width,
            _BLOCK,
            early,
            num_warps=2,
            **early_options(early),
        )
