"""Lists the query blocks of an extend step on the device, the longest first, and shares out the longest ones.

A query block is up to query_tokens consecutive new tokens of one sequence. A program places one block at its rank: the
number of blocks of all sequences that reach further, which has a closed form for each sequence, so nothing is sorted.
Blocks of about equal reach (of one class, see _class_of) stay sequence by sequence: programs that run at a time then
read the same keys, from the L2. All blocks of a sequence whose new tokens follow many more keys stay together so, in
the class of its length: they reach nearly as far. A row is a block and a KV head, or part of that head's query heads;
it costs the keys that the block sees plus row_keys. The cost of all blocks that come before one has a closed form too.

Rows then lie on one axis, block by block. The `cut` longest blocks are shared out: with `shared` the cost of their
rows, program p takes the positions [p * share, (p + 1) * share), share = ceil(shared / programs). Each row after them
belongs to one program, and starts when a program ends. So, as in decode_schedule.py,

  a program leaves at most two rows unfinished: the first, begun by an earlier program, and the last, which goes on;
  the parts of a row that starts at position x are those of programs x // share to (x + cost - 1) // share.

If there are at least two programs for each row, tiles may have all rows cut alike (alike_keys), each part a program of
its own: R rows into n = P // R parts of equal size, or into fewer if these would be smaller than least_keys. Up to
eight parts may be as small as half of least_keys. Then no program begins a second row, and programs of a sequence's KV
heads read the same keys, next to each other in a page, at the same time. The size is that of the longest row. Its last
part is shorter, since it has the diagonal and the end of the row; a shorter row has an even shorter last part, or fewer
parts. Row r counts as one that starts at r n parts. Rows are cut so if the size, plus alike_keys for the merge, is no
more than the estimate below.

The cut is the one with the lowest estimate, of _CUTS evenly spaced ones:

    max(shared / programs, least_keys) + split_keys + gain / 16 mean loads
    + max(rest / programs, (k + 1) cost of the row after k rounds)

The terms of the first line count only if something is shared. No share is smaller than least_keys, or larger than
most_keys. The last term is there because k + 1 rows that long have one slot among programs.

Deterministic attention shares rows by whole segments (segment_len) and keeps each as a part. So a share takes as long
as its segments, rounded up, and costs gain / 16 of its keys more. No share is smaller than a segment: if rows are few,
some programs have no share, and these take the first of the whole rows (hopper/rows.py). Or whole rows are a launch
of their own, after that of the shares (shares_first). Rows that are cut alike have parts of as few whole segments as
programs allow. Else a share that is a little longer than a segment may have the ends of two.

The schedule is int32, flat, BLOCK_WORDS per block, then SHARE_WORDS per program. num_tokens // query_tokens + num_seqs
+ 1 blocks are enough for any split of num_tokens, the padded tail included. Costs are in keys, 64 bits.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.attention import cuts
from rocm_attn.kernels.attention.arguments import Queries
from rocm_attn.kernels.attention.cuts import ExtendCut, Sequences
from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW
from rocm_attn.kernels.launch import launch

_ALL = tl.constexpr(Sequences.ALL.value)
_WITH_CELLS = tl.constexpr(Sequences.WITH_CELLS.value)
# The length of a sequence that has new tokens and no keys: before all places, and after it adding up fits 32 bits.
_NO_KEYS = tl.constexpr(-(1 << 29))
# The words of a query block.
BLOCK_WORDS = tl.constexpr(cuts.BLOCK_WORDS)
BLOCK_SEQ = tl.constexpr(0)  # -1: the tokens belong to no sequence (the padded tail); they receive 0 and LSE -inf
BLOCK_FIRST_TOKEN = tl.constexpr(1)
BLOCK_TOKENS = tl.constexpr(2)  # 0: nothing to do
BLOCK_KV_INDEX = tl.constexpr(3)  # of the first token
BLOCK_KEYS = tl.constexpr(4)  # its last key is that of its last token, or of its sequence; these before it are seen
BLOCK_COUNT = tl.constexpr(5)  # of the first block only: the number of blocks with tokens, the tail's included
BLOCK_BEFORE = tl.constexpr(6)  # an even word, 64 bits: cost of the blocks before it, counting one row of each
# The words of a program's share.
SHARE_WORDS = tl.constexpr(cuts.SHARE_WORDS)
SHARE_BLOCK = tl.constexpr(0)
SHARE_ROW = tl.constexpr(1)  # of that block
SHARE_DONE = tl.constexpr(2)  # offset of its first work in that row
SHARE_WORK = tl.constexpr(3)
SHARE_START = tl.constexpr(4)  # 64 bits: position where the row starts
SHARE_SIZE = tl.constexpr(6)  # of every share
SHARE_CUT = tl.constexpr(7)  # blocks that are shared out
SHARE_PARTS = tl.constexpr(8)  # 64 bits: parts that each row has room for, if rows are cut alike; else 0
# Rows that are cut alike may have up to this many parts that are smaller than other shares: merging many takes long. On
# an H200 8 x 1 heads of 128, 16 new of 16016, in 62 parts each 15.5 us, in 125 19.7; between 8 and 62 nothing was
# measured.
_SMALL_PARTS = tl.constexpr(8)
# Sequences, blocks, cuts and rounds that a program handles at a time; fixed numbers, so that no batch size needs
# another compilation.
_SEQS_AT_ONCE = 512
_BLOCKS_AT_ONCE = 512
_CUTS = 128
_ROUNDS = 16


# A class of reaches: at most a quarter longer than its shortest one, and no narrower than 128 keys.
_CLASS_BITS = tl.constexpr(cuts.CLASS_BITS)
_CLASS_KEYS_LOG2 = tl.constexpr(cuts.CLASS_KEYS_LOG2)


@triton.jit
def work_of_share(share):
    """Query block and row of a program's first work, its offset in that row, and all that the program takes."""
    block, row = tl.load(share + SHARE_BLOCK), tl.load(share + SHARE_ROW)
    return block, row, tl.load(share + SHARE_DONE), tl.load(share + SHARE_WORK)


@triton.jit
def row_after(query_block, row, ROWS: tl.constexpr):
    """Query block and row of the next row; every query block has ROWS rows."""
    row += 1
    return tl.where(row == ROWS, query_block + 1, query_block), tl.where(row == ROWS, 0, row)


class ListGeometry(NamedTuple):
    """Constants of the list's kernel: QUERY_TOKENS, CAUSAL, WINDOWED, SEQUENCES of the cut; SEQS: sequences per
    iteration.
    """

    QUERY_TOKENS: int
    CAUSAL: bool
    WINDOWED: bool
    SEQUENCES: int
    SEQS: int


class _Batch(NamedTuple):
    """The sequences of a step: lengths, first tokens, first keys with cells; their number, and the fewest new tokens of
    those that are listed.
    """

    kv_len: Any
    q_indptr: Any
    first_cell: Any
    num_seqs: Any
    min_q_len: Any


@triton.jit
def _length_of(kv_len, q_len, G: tl.constexpr):
    """kv_len, or _NO_KEYS for a sequence that lost its keys (metadata/check_pages.py) and keeps its tokens: its blocks
    come after all others.
    """
    return tl.where(kv_len < q_len, _NO_KEYS, kv_len) if G.CAUSAL else kv_len


@triton.jit
def _blocks_of(batch, seq, G: tl.constexpr):
    """First token, new tokens, keys and query blocks of each sequence; no blocks for those that are not listed."""
    inside = seq < batch.num_seqs
    token = tl.load(batch.q_indptr + seq, mask=inside, other=0)
    q_len = tl.load(batch.q_indptr + seq + 1, mask=inside, other=0) - token
    length = tl.load(batch.kv_len + seq, mask=inside, other=0)
    is_listed = inside & (q_len >= batch.min_q_len)
    if G.SEQUENCES != _ALL:
        has_cells = tl.load(batch.first_cell + seq, mask=inside, other=0) < length
        is_listed = is_listed & (has_cells == (G.SEQUENCES == _WITH_CELLS))
    length = _length_of(length, q_len, G)
    return token, q_len, length, tl.where(is_listed, tl.cdiv(q_len, G.QUERY_TOKENS), 0)


@triton.jit
def _most_keys(q_len, window_left, G: tl.constexpr):
    """The most keys that a block of a sequence sees with a window; if not causal, also those of its first token."""
    return window_left + (G.QUERY_TOKENS if G.CAUSAL else q_len)


@triton.jit
def _keys_of_last(count, blocks, q_len, length, window_left, G: tl.constexpr):
    """The keys, int64, that the last `count` of a sequence's blocks see, added up over the blocks."""
    if G.CAUSAL:
        prefix = (length - q_len).to(tl.int64)
        first = (blocks - count).to(tl.int64)
        full = (blocks - 1).to(tl.int64)
        # Blocks [first, full) reach to prefix + (index + 1) QUERY_TOKENS; the last one to the sequence's end.
        bounded = full
        last = length.to(tl.int64)
        most = last
        if G.WINDOWED:
            most = _most_keys(q_len, window_left, G).to(tl.int64)
            bounded = tl.minimum(tl.maximum(most - prefix, 0) // G.QUERY_TOKENS, full)
            last = tl.minimum(last, most)
        bounded = tl.maximum(bounded, first)
        squares = (bounded * (bounded + 1) - first * (first + 1)) // 2
        keys = (bounded - first) * prefix + squares * G.QUERY_TOKENS + (full - bounded) * most + last
        keys = tl.where(count > 0, keys, 0)
    else:
        if G.WINDOWED:
            length = tl.minimum(length, _most_keys(q_len, window_left, G))
        keys = count.to(tl.int64) * length
    return keys


@triton.jit
def _stays_together(length, q_len):
    """True if all blocks of a sequence are of one class, that of its length.

    H200, 12 x 700 new of 2000, 32 x 32 heads of 128: 534 us by classes of reaches, 453 so. If as many keys as new
    tokens were enough, 4 x 1000 new of 2000, 16 x 16 of 256, would have all rows shared out: 234 us instead of 206.
    """
    return (length - q_len) // 3 >= q_len // 2


@triton.jit
def _class_of(reach):
    """The reaches [first, end) of one class with this one: those that agree in their leading bits."""
    units = (reach >> _CLASS_KEYS_LOG2) + 1
    # The exponent of a float32 is the number of the leading bit: units are 2^24 at most, so none is rounded.
    leading = (units.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    shift = tl.maximum(leading - _CLASS_BITS, 0)
    first = (units >> shift) << shift
    return (first - 1) << _CLASS_KEYS_LOG2, (first - 1 + (1 << shift)) << _CLASS_KEYS_LOG2


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "min_q_len", "window_left", "row_keys"])
def _list_kernel(
    kv_len,
    q_indptr,
    first_cell,
    schedule,
    num_seqs,
    num_tokens,
    min_q_len,
    window_left,
    row_keys,
    G: tl.constexpr,
):
    QUERY_TOKENS: tl.constexpr = G.QUERY_TOKENS
    SEQS: tl.constexpr = G.SEQS
    block = tl.program_id(0)
    lane = tl.arange(0, SEQS)
    batch = _Batch(kv_len, q_indptr, first_cell, num_seqs, min_q_len)

    # The block's sequence, its place among that sequence's blocks, and the number of all blocks.
    total = 0
    seq = 0
    first_block = 0
    first_token = 0
    seq_q_len = 0
    for first in range(0, num_seqs, SEQS):
        # token, q_len, blocks: [SEQS]
        token, q_len, _, blocks = _blocks_of(batch, first + lane, G)
        end = total + tl.cumsum(blocks, 0)
        here = (end > block) & (end - blocks <= block)
        seq += tl.sum(tl.where(here, first + lane, 0), 0)
        first_block += tl.sum(tl.where(here, end - blocks, 0), 0)
        first_token += tl.sum(tl.where(here, token, 0), 0)
        seq_q_len += tl.sum(tl.where(here, q_len, 0), 0)
        total += tl.sum(blocks, 0)

    first_tail = tl.load(q_indptr + num_seqs)
    if block == 0:
        tail_blocks = tl.cdiv(tl.maximum(num_tokens - first_tail, 0), QUERY_TOKENS)
        tl.store(schedule + BLOCK_COUNT, total + tail_blocks)
    is_block = block < total
    # If there is no such block, the first sequence's; nothing of it is used then. Some steps have no sequence.
    length = tl.load(kv_len + seq, mask=num_seqs > 0, other=0)
    length = _length_of(length, seq_q_len, G)
    prefix = length - seq_q_len
    offset = (block - first_block) * QUERY_TOKENS
    extent = prefix + tl.minimum(seq_q_len, offset + QUERY_TOKENS) if G.CAUSAL else length
    first_alike, end_alike = _class_of(tl.where(_stays_together(length, seq_q_len), length, extent))
    # If there is no such block, the cost of all blocks.
    rank = 0
    before = tl.zeros([], tl.int64)
    for first in range(0, num_seqs, SEQS):
        other = first + lane
        _, q_len, other_len, blocks = _blocks_of(batch, other, G)
        # Blocks of the other sequence that go before this one: of a longer class, or if it is earlier, of the same.
        goes_before = (other_len >= end_alike) | ((other_len >= first_alike) & (other < seq))
        count = tl.where(goes_before, blocks, 0)
        if G.CAUSAL:
            edge = tl.where(other < seq, first_alike, end_alike) - 1
            later = tl.maximum(edge - (other_len - q_len), 0)
            later_blocks = tl.where(later >= q_len, blocks, later // QUERY_TOKENS)
            by_reach = blocks - tl.minimum(later_blocks, blocks)
            count = tl.where(_stays_together(other_len, q_len), count, by_reach)
        index = block - first_block
        count = tl.where(other == seq, blocks - 1 - index if G.CAUSAL else index, count)
        count = tl.where(is_block, count, blocks)
        keys = _keys_of_last(count, blocks, q_len, other_len, window_left, G)
        before += tl.sum(keys + count.to(tl.int64) * row_keys, 0)
        rank += tl.sum(count, 0)
    if is_block:
        keys = tl.minimum(extent, _most_keys(seq_q_len, window_left, G)) if G.WINDOWED else extent
        words = schedule + rank * BLOCK_WORDS
        has_keys = length >= 0
        tl.store(words + BLOCK_SEQ, tl.where(has_keys, seq, -1))
        tl.store(words + BLOCK_FIRST_TOKEN, first_token + offset)
        tl.store(words + BLOCK_TOKENS, tl.minimum(seq_q_len - offset, QUERY_TOKENS))
        tl.store(words + BLOCK_KV_INDEX, tl.where(has_keys, prefix + offset, 0))
        tl.store(words + BLOCK_KEYS, tl.where(has_keys, keys, 0))
    else:
        tail = first_tail + (block - total) * QUERY_TOKENS
        words = schedule + block * BLOCK_WORDS
        tl.store(words + BLOCK_SEQ, -1)
        tl.store(words + BLOCK_FIRST_TOKEN, tail)
        tl.store(words + BLOCK_TOKENS, tl.minimum(tl.maximum(num_tokens - tail, 0), QUERY_TOKENS))
        tl.store(words + BLOCK_KV_INDEX, 0)
        tl.store(words + BLOCK_KEYS, 0)
    tl.store((words + BLOCK_BEFORE).to(tl.pointer_type(tl.int64)), before)


@triton.jit
def _cost_before(schedule, block, is_block):
    """Cost of the blocks before one, counting one row of each; block: [..], is_block: which of them to read."""
    return tl.load(
        (schedule + block * BLOCK_WORDS + BLOCK_BEFORE).to(tl.pointer_type(tl.int64)), mask=is_block, other=0
    )


class ShareGeometry(NamedTuple):
    """The values that shares are compiled for: ROWS of a block; SEGMENT_LEN, SHARES_FIRST, ALIKE_KEYS and ROW_KEYS of
    cuts.RowSharing; BLOCKS, CUTS, ROUNDS that are handled at a time.
    """

    ROWS: int
    SEGMENT_LEN: int
    SHARES_FIRST: bool
    ALIKE_KEYS: int
    ROW_KEYS: int
    BLOCKS: int
    CUTS: int
    ROUNDS: int


@triton.jit
def _longest_rounds(schedule, cut, num_blocks, first, slots, G: tl.constexpr):
    """[CUTS], int64: the most that a slot's rows cost, counted as k + 1 rows as long as the first one of round k.

    cut:   [CUTS] the rows are those of the blocks after it, slots of them per round
    first: [CUTS] rows that rounds 0, 2, ... begin after: slots that come first there come last in the others
    """
    rounds = tl.arange(0, G.ROUNDS)
    # row, block, cost: [CUTS, ROUNDS]
    row = (rounds * slots)[None, :] + first[:, None] * (1 - rounds % 2)[None, :]
    block = cut[:, None] + row // G.ROWS
    is_block = block < num_blocks
    cost = _cost_before(schedule, block + 1, is_block) - _cost_before(schedule, block, is_block)
    return tl.max(cost * (rounds + 1)[None, :], 1)


@triton.jit
def _alike_parts(schedule, num_blocks, num_programs, least_keys, G: tl.constexpr):
    """The number of parts that all rows would be cut into, and the size of one in keys; one part: they are not cut."""
    lane = tl.arange(0, G.BLOCKS)
    longest = tl.zeros([], tl.int64)
    for first in range(0, num_blocks, G.BLOCKS):
        is_block = first + lane < num_blocks
        cost = _cost_before(schedule, first + lane + 1, is_block) - _cost_before(schedule, first + lane, is_block)
        longest = tl.maximum(longest, tl.max(cost, 0))
    keys = tl.maximum(longest - G.ROW_KEYS, 0)
    programs_of_row = num_programs // tl.maximum(num_blocks * G.ROWS, 1)
    if G.SEGMENT_LEN > 0:
        segments = tl.cdiv(keys, G.SEGMENT_LEN)
        parts = tl.maximum(tl.minimum(programs_of_row, segments.to(tl.int32)), 1)
        size = tl.cdiv(segments, parts) * G.SEGMENT_LEN
    else:
        of_least = (keys // tl.maximum(least_keys, 1)).to(tl.int32)
        of_halves = (keys // tl.maximum(least_keys // 2, 1)).to(tl.int32)
        most = tl.maximum(of_least, tl.minimum(of_halves, _SMALL_PARTS))
        parts = tl.maximum(tl.minimum(programs_of_row, most), 1)
        # The keys by which the last part of the longest row is shorter.
        row_end = tl.minimum(tl.cdiv(keys, parts) // 2, G.ROW_KEYS)
        size = tl.cdiv(keys + row_end, parts)
    return parts, size


@triton.jit(do_not_specialize=["max_blocks", "num_programs", "split_keys", "gain", "least_keys", "most_keys"])
def _share_kernel(
    schedule,
    max_blocks,
    num_programs,
    split_keys,
    gain,
    least_keys,
    most_keys,
    G: tl.constexpr,
):
    ROWS: tl.constexpr = G.ROWS
    lane = tl.arange(0, G.BLOCKS)
    # All blocks of sequences come before those of the tail, of which there is one at least.
    num_blocks = 0
    for first in range(0, max_blocks, G.BLOCKS):
        seq = tl.load(schedule + (first + lane) * BLOCK_WORDS + BLOCK_SEQ, mask=first + lane < max_blocks, other=-1)
        num_blocks += tl.sum((seq >= 0).to(tl.int32), 0)

    # cut, shared, estimate: [CUTS]
    stride = tl.maximum(tl.cdiv(num_blocks, G.CUTS - 1), 1)
    cut = tl.minimum(tl.arange(0, G.CUTS) * stride, num_blocks)
    total = _cost_before(schedule, num_blocks, True) * ROWS
    shared = _cost_before(schedule, cut, cut <= num_blocks) * ROWS
    longest = _longest_rounds(schedule, cut, num_blocks, cut * 0, num_programs, G)
    if G.SEGMENT_LEN > 0:
        of_program = tl.maximum(tl.cdiv(shared, num_programs), least_keys)
        taken = tl.cdiv(of_program, G.SEGMENT_LEN) * G.SEGMENT_LEN
        if G.SHARES_FIRST:
            sharing = taken + tl.maximum(longest, (total - shared) // num_programs)
        else:
            without = num_programs - tl.cdiv(shared, of_program)
            later = _longest_rounds(schedule, cut, num_blocks, without.to(tl.int32), num_programs, G)
            sharing = tl.maximum(tl.maximum(longest, taken + later), total // num_programs)
        price = split_keys + shared // num_programs * gain // 16
        estimate = tl.where(cut > 0, sharing + price, longest)
    else:
        of_program = tl.maximum(shared // num_programs, least_keys)
        price = split_keys + total // num_programs * gain // 16
        estimate = tl.where(cut > 0, of_program + price, 0)
        estimate += tl.maximum((total - shared) // num_programs, longest)
    estimate = tl.where(shared > tl.cast(most_keys, tl.int64) * num_programs, 1 << 50, estimate)
    best = tl.min(estimate * G.CUTS + tl.arange(0, G.CUTS), 0) & (G.CUTS - 1)
    cut_blocks = tl.minimum(best.to(tl.int32) * stride, num_blocks)

    program = tl.program_id(0)
    end_of_shared = _cost_before(schedule, cut_blocks, True) * ROWS
    share = tl.maximum(tl.cdiv(end_of_shared, num_programs), least_keys)
    start = program * share
    work = tl.maximum(tl.minimum(share, end_of_shared - start), 0)
    # The block whose positions contain `start`: the number of blocks that end at or before it.
    at = 0
    for first in range(0, cut_blocks, G.BLOCKS):
        is_shared = first + lane < cut_blocks
        end = _cost_before(schedule, first + lane + 1, is_shared) * ROWS
        at += tl.sum((is_shared & (end <= start)).to(tl.int32), 0)
    before = _cost_before(schedule, at, work > 0)
    row_cost = tl.maximum(_cost_before(schedule, at + 1, work > 0) - before, 1)
    row = (start - before * ROWS) // row_cost
    row_start = before * ROWS + row * row_cost
    parts = 0
    if G.ALIKE_KEYS > 0:
        most, size = _alike_parts(schedule, num_blocks, num_programs, least_keys, G)
        if (most > 1) & (size <= most_keys) & (size + G.ALIKE_KEYS <= tl.min(estimate, 0)):
            parts, share, cut_blocks = most, size, num_blocks
            index, part = program // parts, program % parts
            at = tl.minimum(index // ROWS, num_blocks)
            row = (index % ROWS).to(tl.int64)
            is_row = index < num_blocks * ROWS
            cost = _cost_before(schedule, at + 1, is_row) - _cost_before(schedule, at, is_row)
            done = tl.where(part > 0, part * share + G.ROW_KEYS, 0)
            work = tl.maximum(tl.minimum((part + 1) * share + G.ROW_KEYS, cost) - done, 0)
            row_start = index.to(tl.int64) * parts * share
            start = row_start + tl.where(work > 0, done, 0)
    words = schedule + max_blocks * BLOCK_WORDS + program * SHARE_WORDS
    tl.store(words + SHARE_BLOCK, at)
    tl.store(words + SHARE_ROW, row.to(tl.int32))
    tl.store(words + SHARE_DONE, (start - row_start).to(tl.int32))
    tl.store(words + SHARE_WORK, work.to(tl.int32))
    tl.store((words + SHARE_START).to(tl.pointer_type(tl.int64)), row_start)
    tl.store(words + SHARE_SIZE, share.to(tl.int32))
    tl.store(words + SHARE_CUT, cut_blocks)
    tl.store((words + SHARE_PARTS).to(tl.pointer_type(tl.int64)), tl.cast(parts, tl.int64))


def launch_extend_schedule(
    queries: Queries, schedule: Tensor, cut: ExtendCut, first_cell: Tensor | None = None
) -> None:
    """Fills the schedule of the queries' sequences, on the device.

    schedule:   int32 [cut.words(T, S)] or longer, written
    first_cell: int32 [S], the first key of each sequence that has cells, kv_len if none has; None: no sequence has any
    """
    queries.check()
    assert first_cell is None or (first_cell.dtype == torch.int32 and first_cell.shape == (queries.num_seqs,))
    num_tokens, num_seqs, sharing = queries.num_tokens, queries.num_seqs, cut.sharing
    cut.check(schedule, num_tokens, num_seqs)
    max_blocks = cut.max_blocks(num_tokens, num_seqs)
    launch(
        _list_kernel,
        (max_blocks,),
        queries.kv_len,
        queries.q_indptr,
        queries.kv_len if first_cell is None else first_cell,
        schedule,
        num_seqs,
        num_tokens,
        cut.min_q_len,
        sharing.window_left,
        sharing.row_keys,
        G=ListGeometry(
            cut.query_tokens,
            sharing.causal,
            sharing.window_left != UNLIMITED_WINDOW,
            cut.sequences.value,
            _SEQS_AT_ONCE,
        ),
        num_warps=4,
    )
    launch(
        _share_kernel,
        (sharing.programs,),
        schedule,
        max_blocks,
        sharing.programs,
        sharing.split_keys,
        sharing.gain,
        sharing.least_keys,
        sharing.most_keys,
        G=ShareGeometry(
            sharing.rows,
            sharing.segment_len,
            sharing.shares_first,
            sharing.alike_keys,
            sharing.row_keys,
            _BLOCKS_AT_ONCE,
            _CUTS,
            _ROUNDS,
        ),
        num_warps=4,
    )
