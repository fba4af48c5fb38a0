"""Reads an extend program's query block and writes the results of the block's tokens.

Rows of a query block are [token, head]: query heads of one KV head next to each other, so that K and V are loaded once
for all of them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.attention.coded import scaled_parts
from rocm_attn.kernels.attention.extend_schedule import BLOCK_FIRST_TOKEN, BLOCK_TOKENS, BLOCK_WORDS
from rocm_attn.kernels.attention.key_loop import RowKeys, is_column
from rocm_attn.kernels.attention.softmax import LN_2, add_sink


class BlockGeometry(NamedTuple):
    """The values that an extend kernel is compiled for.

    keys:        of the loop over keys: KeyGeometry, or LatentGeometry over latent pages
    KV_HEADS:    KV heads; those that are read as one count as one, here and below
    GQA_RATIO:   query heads that share a KV head
    BLOCK_HEADS: query heads of a block
    HEAD_BLOCKS: blocks that the query heads of a KV head are cut into
    QUERY_ROWS:  rows of a block, a token and a query head each
    ROW_KEYS:    of cuts.RowSharing; 0: every row is one program's
    SHARES:      whether programs take their shares of the longest rows
    WHOLE_ROWS:  whether programs take the other rows
    SEGMENT_LEN: keys of a segment of deterministic attention; 0: keys are not cut
    STAGES:      key blocks whose loads are in flight if every row sees all keys
    EDGE_STAGES: the same if keys are masked
    EARLY:       whether launches may begin while the one before still runs
    STRIDE_UNIT: elements that strides of q, pages and out are counted in
    SLOTS:       in deterministic attention, parts of rows that a program which shares has room for
    """

    keys: Any
    KV_HEADS: int
    GQA_RATIO: int
    BLOCK_HEADS: int
    HEAD_BLOCKS: int
    QUERY_ROWS: int
    ROW_KEYS: int
    SHARES: bool
    WHOLE_ROWS: bool
    SEGMENT_LEN: int
    STAGES: int
    EDGE_STAGES: int
    EARLY: bool = False
    STRIDE_UNIT: int = 1
    SLOTS: int = 0


@triton.jit
def rows_of_block(first_token, num_tokens, kv_head, head_block, G: tl.constexpr):
    """Token and query head (int64) of each row of a block, and whether the row has one; all [QUERY_ROWS]."""
    row = tl.arange(0, G.QUERY_ROWS)
    block_token = row // G.BLOCK_HEADS
    ratio_head = head_block * G.BLOCK_HEADS + row % G.BLOCK_HEADS
    is_row = block_token < num_tokens
    if G.HEAD_BLOCKS * G.BLOCK_HEADS > G.GQA_RATIO:
        is_row = is_row & (ratio_head < G.GQA_RATIO)
    return (first_token + block_token).to(tl.int64), (kv_head * G.GQA_RATIO + ratio_head).to(tl.int64), is_row


@triton.jit
def rows_again(schedule, query_block, row, G: tl.constexpr):
    """Does the same as `rows_of_block`, but reads the row's words again, because loops need the registers."""
    words = schedule + query_block * BLOCK_WORDS
    first_token = tl.load(words + BLOCK_FIRST_TOKEN, volatile=True)
    num_tokens = tl.load(words + BLOCK_TOKENS, volatile=True)
    return rows_of_block(first_token, num_tokens, row // G.HEAD_BLOCKS, row % G.HEAD_BLOCKS, G)


class KeysOfStep(NamedTuple):
    """The visible keys of a step (visible_keys.py), and the tokens that they are of: words, indptr and start of cells,
    or None; first and end of ranges; q_indptr.
    """

    words: Any
    indptr: Any
    start: Any
    first: Any
    end: Any
    q_indptr: Any


@triton.jit
def keys_of_block(step, seq, first_token, is_row, kv_len, G: tl.constexpr):
    """The keys that a block's rows see, as RowKeys.

    step:   KeysOfStep
    seq:    below 0: the padded tail, which sees no key; its cells are those of the first sequence
    kv_len: of the sequence; not read without cells
    """
    K: tl.constexpr = G.keys
    block_token = tl.arange(0, G.QUERY_ROWS) // G.BLOCK_HEADS
    token = (first_token + block_token).to(tl.int64)
    row_end = tl.load(step.end + token, mask=is_row, other=0)
    end = tl.max(row_end, 0)
    # Rows without a token are no reason for a mask.
    edge = tl.min(tl.where(is_row, row_end, end), 0)
    first = 0
    row_first = row_end  # not read without a window
    if K.WINDOWED:
        row_first = tl.load(step.first + token, mask=is_row, other=0x7FFFFFFF)
        # Tokens of a tree lie at any depth of it: the first key of all rows need not be the first row's.
        first = tl.minimum(tl.maximum(tl.min(row_first, 0), 0), end)
    # Not read without cells.
    words = step.end
    cell = row_end
    start = 0
    if step.words is not None:
        seq_cell = tl.load(step.indptr + tl.maximum(seq, 0))
        seq_token = tl.load(step.q_indptr + tl.maximum(seq, 0))
        start = tl.load(step.start + tl.maximum(seq, 0))
        mask_len = kv_len - start
        block_cell = seq_cell + (first_token - seq_token).to(tl.int64) * mask_len
        # From here on cells are counted from the block's first word, and fit 32 bits.
        words = step.words + block_cell // 32
        cell = (block_cell % 32).to(tl.int32) + block_token * mask_len
        # The cells of a sequence that lost its keys, of which it sees none, begin below key 0.
        edge = tl.minimum(edge, tl.maximum(start, 0))
        if K.WINDOWED:
            edge = first
    elif K.WINDOWED:
        # Rows of one chunk begin at one key. Those of a window do not.
        latest = tl.max(tl.where(is_row, row_first, 0), 0)
        edge = tl.where((latest <= first) & (first % K.KEY_BLOCK == 0), edge, first)
    return RowKeys(first, end, edge, row_first, row_end, words, cell, start)


@triton.jit
def _own_columns(head, COLUMNS: tl.constexpr, DIM: tl.constexpr, K: tl.constexpr):
    """Offsets of columns of several KV heads in a row of one of them, [1, COLUMNS], and whether they are those of the
    KV head that a query head shares, [rows, COLUMNS].
    """
    column = tl.arange(0, COLUMNS)[None, :]
    own = (head // K.HEAD_ROWS % K.HEADS_PER_ROW).to(tl.int32)[:, None]
    return column % DIM, column // DIM == own


@triton.jit
def load_queries(q, token, head, is_row, K: tl.constexpr):
    """The rows of q, a block [QUERY_ROWS, K_COLUMNS] for each of K_PARTS; 0 without a row and in padded columns.

    If several KV heads are read as one, the columns of the others are zero too: one product over all of them gives each
    row the scores of its own head, and its result is in its own head's columns.
    """
    rows = q.at + (token * q.token + head * q.head)[:, None]
    blocks = ()
    K_PARTS: tl.constexpr = K.K_PARTS
    if K.HEADS_PER_ROW > 1:
        column, own = _own_columns(head, K.K_COLUMNS, K.HEAD_DIM, K)
        blocks += (tl.load(rows + column, mask=is_row[:, None] & own, other=0.0),)  # type: ignore[assignment]
    else:
        rows += tl.arange(0, K.K_COLUMNS)[None, :]
        for i in tl.static_range(K_PARTS):
            is_q = is_row[:, None]
            if (i + 1) * K.K_COLUMNS > K.HEAD_DIM:
                is_q = is_q & is_column(i, K.K_COLUMNS, K.HEAD_DIM)
            blocks += (tl.load(rows + i * K.K_COLUMNS, mask=is_q, other=0.0),)  # type: ignore[assignment]
    return blocks


@triton.jit
def store_columns(rows, parts, head, is_row, K: tl.constexpr):
    """Writes blocks of V's columns. rows: pointers [rows, 1]; head: [rows], query heads; is_row: [rows]"""
    V_PARTS: tl.constexpr = K.V_PARTS
    if K.HEADS_PER_ROW > 1:
        column, own = _own_columns(head, K.V_COLUMNS, K.V_HEAD_DIM, K)
        tl.store(rows + column, parts[0].to(rows.dtype.element_ty), mask=is_row[:, None] & own)
    else:
        for i in tl.static_range(V_PARTS):
            is_v = is_row[:, None]
            if (i + 1) * K.V_COLUMNS > K.V_HEAD_DIM:
                is_v = is_v & is_column(i, K.V_COLUMNS, K.V_HEAD_DIM)
            block = rows + (i * K.V_COLUMNS + tl.arange(0, K.V_COLUMNS))[None, :]
            tl.store(block, parts[i].to(rows.dtype.element_ty), mask=is_v)


@triton.jit
def store_results(softmax, token, head, is_row, sinks, out, lse, K: tl.constexpr):
    """Writes out and, if lse.at is not None, LSE of the rows, with their sinks."""
    acc, maximum, total = softmax
    if sinks is not None:
        sink = tl.load(sinks + head, mask=is_row, other=float("-inf"))
        maximum, total, decay = add_sink(maximum, total, sink)
        acc = scaled_parts(acc, decay[:, None])
    # Tokens of no sequence have seen no key: 0 / 1, and LSE -inf + log2(1).
    total = tl.where(total == 0.0, 1.0, total)
    value = ()
    V_PARTS: tl.constexpr = K.V_PARTS
    for i in tl.static_range(V_PARTS):
        value += (acc[i] / total[:, None],)  # type: ignore[assignment]
    store_columns(out.at + (token * out.token + head * out.head)[:, None], value, head, is_row, K)
    if lse.at is not None:
        tl.store(lse.at + token * lse.token + head * lse.head, (maximum + tl.log2(total)) * LN_2, mask=is_row)
