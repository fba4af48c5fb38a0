"""List the query blocks of an extend step on the device, the longest first, from the live lengths.

A query block is up to query_tokens consecutive new tokens of one sequence; its extent is the number of keys that the
last of them sees. A program places one block at its rank: the number of blocks of all sequences that reach further,
which has a closed form for each sequence, so nothing is sorted. Blocks of equal extent keep the order of their
sequences.

The schedule is int32, flat, BLOCK_WORDS a block. num_tokens // query_tokens + num_seqs + 1 blocks are enough for any
split of num_tokens, the padded tail included.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.attention import cuts
from rocm_attn.kernels.attention.arguments import Queries
from rocm_attn.kernels.attention.cuts import ExtendCut
from rocm_attn.kernels.launch import launch

# The words of a query block.
BLOCK_WORDS = tl.constexpr(cuts.BLOCK_WORDS)
BLOCK_SEQ = tl.constexpr(0)  # -1: the tokens belong to no sequence (the padded tail); they receive 0 and LSE -inf
BLOCK_FIRST_TOKEN = tl.constexpr(1)
BLOCK_TOKENS = tl.constexpr(2)  # 0: nothing to do
BLOCK_KV_INDEX = tl.constexpr(3)  # of the first token
# Sequences that a program looks at in one step; a fixed number, so that no batch size needs another compilation.
_SEQS_AT_ONCE = 512


@triton.jit
def _blocks_of(q_indptr, seq, num_seqs, min_q_len, QUERY_TOKENS: tl.constexpr):
    """First token, new tokens and query blocks of each sequence; no blocks below min_q_len."""
    inside = seq < num_seqs
    token = tl.load(q_indptr + seq, mask=inside, other=0)
    q_len = tl.load(q_indptr + seq + 1, mask=inside, other=0) - token
    return token, q_len, tl.where(inside & (q_len >= min_q_len), tl.cdiv(q_len, QUERY_TOKENS), 0)


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "min_q_len"])
def _list_kernel(
    kv_len,
    q_indptr,
    schedule,
    num_seqs,
    num_tokens,
    min_q_len,
    QUERY_TOKENS: tl.constexpr,
    SEQS: tl.constexpr,
):
    block = tl.program_id(0)
    lane = tl.arange(0, SEQS)

    # The block's sequence, its place among that sequence's blocks, and the number of all blocks.
    total = 0
    seq = 0
    first_block = 0
    first_token = 0
    seq_q_len = 0
    for first in range(0, num_seqs, SEQS):
        # token, q_len, blocks: [SEQS]
        token, q_len, blocks = _blocks_of(q_indptr, first + lane, num_seqs, min_q_len, QUERY_TOKENS)
        end = total + tl.cumsum(blocks, 0)
        here = (end > block) & (end - blocks <= block)
        seq += tl.sum(tl.where(here, first + lane, 0), 0)
        first_block += tl.sum(tl.where(here, end - blocks, 0), 0)
        first_token += tl.sum(tl.where(here, token, 0), 0)
        seq_q_len += tl.sum(tl.where(here, q_len, 0), 0)
        total += tl.sum(blocks, 0)

    if block < total:
        prefix = tl.load(kv_len + seq) - seq_q_len
        offset = (block - first_block) * QUERY_TOKENS
        extent = prefix + tl.minimum(seq_q_len, offset + QUERY_TOKENS)
        rank = 0
        for first in range(0, num_seqs, SEQS):
            other = first + lane
            _, q_len, blocks = _blocks_of(q_indptr, other, num_seqs, min_q_len, QUERY_TOKENS)
            other_prefix = tl.load(kv_len + other, mask=other < num_seqs, other=0) - q_len
            # New tokens of the other sequence whose blocks do not go before this one: those with a smaller extent, and
            # for sequences that are not earlier those with the same.
            later = tl.maximum(extent - (other < seq).to(tl.int32) - other_prefix, 0)
            later_blocks = tl.where(later >= q_len, blocks, later // QUERY_TOKENS)
            rank += tl.sum(blocks - tl.minimum(later_blocks, blocks), 0)
        words = schedule + rank * BLOCK_WORDS
        tl.store(words + BLOCK_SEQ, seq)
        tl.store(words + BLOCK_FIRST_TOKEN, first_token + offset)
        tl.store(words + BLOCK_TOKENS, tl.minimum(seq_q_len - offset, QUERY_TOKENS))
        tl.store(words + BLOCK_KV_INDEX, prefix + offset)
    else:
        tail = tl.load(q_indptr + num_seqs) + (block - total) * QUERY_TOKENS
        words = schedule + block * BLOCK_WORDS
        tl.store(words + BLOCK_SEQ, -1)
        tl.store(words + BLOCK_FIRST_TOKEN, tail)
        tl.store(words + BLOCK_TOKENS, tl.minimum(tl.maximum(num_tokens - tail, 0), QUERY_TOKENS))
        tl.store(words + BLOCK_KV_INDEX, 0)


def launch_extend_schedule(queries: Queries, schedule: Tensor, cut: ExtendCut) -> None:
    """Fill the schedule of the queries' sequences, on the device.

    schedule: int32 [cut.words(T, S)] or longer, written
    """
    queries.check()
    num_tokens, num_seqs = queries.num_tokens, queries.num_seqs
    cut.check(schedule, num_tokens, num_seqs)
    launch(
        _list_kernel,
        (cut.max_blocks(num_tokens, num_seqs),),
        queries.kv_len,
        queries.q_indptr,
        schedule,
        num_seqs,
        num_tokens,
        cut.min_q_len,
        QUERY_TOKENS=cut.query_tokens,
        SEQS=_SEQS_AT_ONCE,
        num_warps=4,
    )
