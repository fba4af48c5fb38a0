"""Clears the padded tokens of an attention output, after kernels that leave them unchanged or write garbage there.

out[t] = 0    lse[t] = -inf        for t >= num_tokens, and for t of row 0 if that is no sequence's
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.launch import launch, only_launches


@triton.jit
def _clear_pads_kernel(
    counts,
    row_of_token,
    out,
    out_token,
    out_head,
    lse,
    lse_token,
    lse_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    token = tl.program_id(0)
    is_pad = token >= tl.load(counts + 1)
    if row_of_token is not None:
        is_pad |= tl.load(row_of_token + token) == 0
    if is_pad:
        t = token.to(tl.int64)
        head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
        head64 = head.to(tl.int64)
        d = tl.arange(0, DIM_BLOCK)[None, :]
        inside = (head[:, None] < HEADS) & (d < DIM)
        zeros = tl.zeros([HEADS_BLOCK, DIM_BLOCK], out.dtype.element_ty)
        tl.store(out + t * out_token + head64[:, None] * out_head + d, zeros, mask=inside)
        if HAS_LSE:
            nothing = tl.full([HEADS_BLOCK], float("-inf"), tl.float32)
            tl.store(lse + t * lse_token + head64 * lse_head, nothing, mask=head < HEADS)


@only_launches
def launch_clear_pads(counts: Tensor, out: Tensor, lse: Tensor | None, row_of_token: Tensor | None) -> None:
    """Writes zeros to the padded tokens of out, and -inf to those of lse.

    counts: int32 [4]; [1] is num_tokens
    row_of_token: int32 [T]; tokens of row 0 are padded ones too, even before others. None: they need not be
    out:    [T, q_heads, v_head_dim], any strides but the last
    lse:    float32 [T, q_heads], any strides; or None
    """
    num_tokens, heads, dim = out.shape
    dim_block = triton.next_power_of_2(dim)
    heads_block = max(1, min(triton.next_power_of_2(heads), 4096 // dim_block))
    has_lse = lse is not None
    rows = lse if lse is not None else out
    launch(
        _clear_pads_kernel,
        (num_tokens, triton.cdiv(heads, heads_block)),
        counts,
        row_of_token,
        out,
        *out.stride()[:2],
        rows,
        *rows.stride()[:2],
        HEADS=heads,
        DIM=dim,
        HEADS_BLOCK=heads_block,
        DIM_BLOCK=dim_block,
        HAS_LSE=has_lse,
        num_warps=4,
    )
