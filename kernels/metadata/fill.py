"""Derive, on the device, everything that follows from a step's lengths: indptr, positions, slots, last tokens.

    q_indptr[i]           = q_len[0] + ... + q_len[i-1]
    last_token_of_seq[i]  = q_indptr[i+1] - 1, or 0 where the sequence has no new token
    position_of_token[t]  = kv_len[i] - q_len[i] + (t - q_indptr[i])            for token t of sequence i
    slot_of_token[t]      = table[row_of_seq[i], position // page_size] * page_size + position % page_size

Each program sums the lengths itself, so none reads what another writes and the launch may run twice.
Tokens at or past num_tokens receive position 0 and slot 0.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.launch import launch

# Cells of the [tokens, sequences] comparison that finds a token's sequence, bounded so that it stays in registers.
_CELLS = 4096
_MAX_TOKENS = 64


@triton.jit(do_not_specialize=["num_seqs_padded", "num_tokens_padded"])
def _fill_kernel(
    counts,
    row_of_seq,
    kv_len,
    q_len,
    table,
    table_stride,
    q_indptr,
    last_token_of_seq,
    position_of_token,
    slot_of_token,
    num_seqs_padded,
    num_tokens_padded,
    width,
    PAGE_SIZE: tl.constexpr,
    SEQS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    i = tl.arange(0, SEQS)
    padded = i < num_seqs_padded
    lengths = tl.load(q_len + i, mask=padded, other=0)
    ends = tl.cumsum(lengths, 0)
    if tl.program_id(0) == 0:
        tl.store(q_indptr + i + 1, ends, mask=padded)
        tl.store(q_indptr, 0)
        tl.store(last_token_of_seq + i, tl.where(lengths > 0, ends - 1, 0), mask=padded)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = t < tl.load(counts + 1)
    before = ends[None, :] <= t[:, None]
    seq = tl.sum(before.to(tl.int32), 1)
    first = tl.sum(tl.where(before, lengths[None, :], 0), 1)
    live = live & (seq < num_seqs_padded)
    total = tl.load(kv_len + seq, mask=live, other=0)
    new = tl.load(q_len + seq, mask=live, other=0)
    row = tl.load(row_of_seq + seq, mask=live, other=0).to(tl.int64)
    position = tl.where(live, total - new + t - first, 0)
    page_no = tl.minimum(position // PAGE_SIZE, width - 1)
    page = tl.load(table + row * table_stride + page_no, mask=live, other=0)
    slot = tl.where(live, page * PAGE_SIZE + position % PAGE_SIZE, 0)
    inside = t < num_tokens_padded
    tl.store(position_of_token + t, position, mask=inside)
    tl.store(slot_of_token + t, slot, mask=inside)


def launch_fill(
    counts: Tensor,
    row_of_seq: Tensor,
    kv_len: Tensor,
    q_len: Tensor,
    table: Tensor,
    q_indptr: Tensor,
    last_token_of_seq: Tensor,
    position_of_token: Tensor,
    slot_of_token: Tensor,
    *,
    page_size: int,
) -> None:
    """Fill q_indptr, last_token_of_seq, position_of_token and slot_of_token from the step's inputs.

    counts:                           int32 [4]; [1] is num_tokens
    row_of_seq, kv_len, q_len:        int32 [S]
    table:                            int32 [rows, width], row and page_no -> page
    q_indptr:                         int32 [S + 1], written
    last_token_of_seq:                int32 [S], written
    position_of_token, slot_of_token: int32 [T], written
    """
    num_seqs, num_tokens = row_of_seq.shape[0], slot_of_token.shape[0]
    seqs = triton.next_power_of_2(max(num_seqs, 2))
    tokens = max(1, min(_MAX_TOKENS, _CELLS // seqs))
    launch(
        _fill_kernel,
        (triton.cdiv(max(num_tokens, 1), tokens),),
        counts,
        row_of_seq,
        kv_len,
        q_len,
        table,
        table.stride(0),
        q_indptr,
        last_token_of_seq,
        position_of_token,
        slot_of_token,
        num_seqs,
        num_tokens,
        table.shape[1],
        PAGE_SIZE=page_size,
        SEQS=seqs,
        TOKENS=tokens,
        num_warps=4,
    )
