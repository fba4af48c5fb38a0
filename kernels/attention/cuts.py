"""The cut of decode's and extend's work: values that a schedule is built from and kernels are launched with.

This module does not import Triton, so that a provider can choose and describe a kernel where there is none.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW
from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles, next_power_of_2

# int32 words of a schedule: per program and per sequence (decode_schedule.py), per query block and per program's
# share (extend_schedule.py).
PROGRAM_WORDS, SEQ_WORDS, BLOCK_WORDS, SHARE_WORDS = 8, 3, 8, 10
# Counters of a program, in a decode schedule that has them: one for each part that the program may leave.
COUNTER_WORDS = 2
# Parts of a group, so that no two groups of a row have one counter (merge_within.py).
LEAST_GROUP = 8
# Query blocks count as equally long if their reaches, in units of 2^CLASS_KEYS_LOG2 keys, agree in the leading bit and
# the CLASS_BITS bits after it.
CLASS_BITS, CLASS_KEYS_LOG2 = 2, 7


# If rows of a step are alike, programs add up rows of at most this many parts by themselves; more are too many for one
# program. H200, 8 rows of 8k, 33 parts each: 18 us, 15 by a launch of its own; 64 of 4k, 4 parts: 42 and 41; 128 of
# 4k, 2 parts: 70 and 71.
_MOST_PARTS = 3
# Rows of a sequence that programs work on side by side, at most. H200, 3 KV heads of 72, 64 x 4k: 74 us so, 86 in
# order; 8 of 112, ragged 64: 187 and 205; 16 of 128: 661 and 670. But 32 of 96, 64 x 4k: 861 and 830, ragged 64: 1179
# and 1107; of 128: 970 and 959, 1307 and 1304.
_MOST_SIDE_BY_SIDE = 16


class NewTokenRange(NamedTuple):
    """The sequences that take part in a decode launch, by their new tokens, and the cut of these into rows.

    FEWEST, MOST: new tokens of a sequence that takes part
    OF_ROW:       consecutive new tokens whose query heads are one row
    """

    FEWEST: int = 1
    MOST: int = 1
    OF_ROW: int = 1


ONE_TOKEN = NewTokenRange()


class RowCut(NamedTuple):
    """The cut of a sequence's work into rows, as decode kernels are compiled for it.

    ROWS:          rows of OF_ROW new tokens
    GQA_RATIO:     query heads that share a KV head
    HEADS_PER_ROW: KV heads of a row
    HEAD_BLOCKS:   blocks that the query heads of a KV head are cut into, a row each
    BLOCK_HEADS:   query heads of such a block; the last one may have fewer
    Q_ROWS:        query heads of a row
    KEY_BLOCK:     keys of a block; in deterministic attention keys of a segment
    ROW_COST, ROW_END, SIDE_BY_SIDE: see DecodeCut
    WINDOWED:      whether there is a window
    TOKENS:        which sequences take part
    """

    ROWS: int
    GQA_RATIO: int
    HEADS_PER_ROW: int
    HEAD_BLOCKS: int
    BLOCK_HEADS: int
    Q_ROWS: int
    KEY_BLOCK: int
    ROW_COST: int
    WINDOWED: bool
    TOKENS: NewTokenRange = ONE_TOKEN
    ROW_END: int = 0
    SIDE_BY_SIDE: bool = False


@dataclass(frozen=True, slots=True)
class DecodeCut:
    """The cut of a decode batch; equal cuts make equal schedules for a step.

    rows:         rows of a sequence with one new token
    key_block:    keys of a block
    row_cost:     cost of starting a row in addition to its key blocks, in blocks
    row_end:      cost of its end, after them. If both are 0, no program visits a row without keys
    programs:     programs that share the work
    window_left:  keys before its last that a sequence sees; UNLIMITED_WINDOW: all of them
    tokens:       which sequences take part
    is_even:      whether rows that are alike are cut alike (decode_schedule.py)
    side_by_side: whether programs work side by side, each on the same keys of a sequence's rows (decode_schedule.py)
    whole_blocks: of the tiles; only if is_even
    merge_group:  of the tiles; if it is not 0, the schedule has counters
    merge_rows:   steps of fewer rows are merged by a launch of their own
    others:       cuts of steps with other numbers of rows
    """

    rows: int
    key_block: int
    row_cost: int
    programs: int
    window_left: int
    tokens: NewTokenRange = ONE_TOKEN
    is_even: bool = False
    row_end: int = 0
    side_by_side: bool = False
    whole_blocks: int = 0
    merge_group: int = 0
    merge_rows: int = 0
    others: tuple[CutByRows, ...] = ()

    def __post_init__(self) -> None:
        assert self.merge_group == 0 or self.merge_group >= LEAST_GROUP
        assert self.row_cost >= 0
        assert self.programs >= 1
        assert 1 <= self.tokens.FEWEST <= self.tokens.MOST
        assert self.rows == 1 or self.tokens.MOST == 1
        assert not self.side_by_side or self.tokens.MOST == 1
        assert self.tokens.OF_ROW >= 1

    @classmethod
    def of(
        cls, tiles: DecodeTiles, *, num_kv_heads: int, programs: int, window_left: int, has_slots: bool = False
    ) -> DecodeCut:
        """The cut of a layer that is served with these tiles.

        has_slots: whether partial results have slots, as in deterministic decode: slots follow rows without a gap, and
                   rows that are cut alike may leave gaps
        """
        rows = tiles.rows_per_seq(num_kv_heads)
        return cls(
            rows,
            tiles.key_block,
            tiles.row_cost,
            programs,
            window_left,
            is_even=not has_slots,
            row_end=tiles.row_end,
            side_by_side=tiles.side_by_side and not has_slots,
            whole_blocks=0 if has_slots else tiles.whole_blocks,
            merge_group=0 if has_slots else tiles.merge_group,
            merge_rows=-(-programs // _MOST_PARTS) if tiles.merge_group and not has_slots else 0,
        )

    def other_of(self, num_seqs: int) -> CutByRows | None:
        """The one of the others that serves steps of num_seqs padded sequences; None: this cut does."""
        return next((each for each in self.others if each.least <= num_seqs * each.cut.rows <= each.most), None)

    def of_step(self, num_seqs: int) -> DecodeCut:
        """The cut of steps of num_seqs padded sequences."""
        other = self.other_of(num_seqs)
        return self.own_of_step(num_seqs) if other is None else other.cut.own_of_step(num_seqs)

    def own_of_step(self, num_seqs: int) -> DecodeCut:
        """This cut for steps of num_seqs sequences. Smaller steps have no more counters."""
        group = self.merge_group if num_seqs * self.rows >= self.merge_rows else 0
        return replace(self, merge_group=group, others=())

    def others_up_to(self, num_seqs: int) -> list[CutByRows]:
        """Those of the others that serve steps of num_seqs sequences or fewer."""
        return [each for each in self.others if each.least <= num_seqs * each.cut.rows]

    def most_words(self, num_seqs: int) -> int:
        """int32 words that hold the schedule of every step of num_seqs sequences or fewer."""
        cuts = self, *(each.cut for each in self.others_up_to(num_seqs))
        return max(cut.own_of_step(num_seqs).words(num_seqs) for cut in cuts)

    @property
    def programs_in_words(self) -> str:
        """Returns how many programs steps have, for descriptions of a kernel."""
        programs = self.programs, *(each.cut.programs for each in self.others)
        least, most = min(programs), max(programs)
        return f"{most}" if least == most else f"{least} to {most}"

    @property
    def axes(self) -> int:
        """Axes that work lies on (decode_schedule.py): one per row of a sequence; only one if rows are many, or if more
        axes would leave more than a sixteenth of the programs without work.
        """
        used = self.programs // self.rows * self.rows
        few_idle = 16 * (self.programs - used) <= self.programs
        return self.rows if self.side_by_side and self.rows <= _MOST_SIDE_BY_SIDE and few_idle else 1

    @property
    def most_rows(self) -> int:
        """The most rows of a sequence."""
        return self.rows * -(-self.tokens.MOST // self.tokens.OF_ROW)

    def words(self, num_seqs: int) -> int:
        """int32 words of the schedule."""
        if self.merge_group:
            return self.first_counter(num_seqs) + COUNTER_WORDS * self.programs
        return self.programs * PROGRAM_WORDS + num_seqs * SEQ_WORDS

    def first_counter(self, num_seqs: int) -> int:
        """The schedule's first counter (merge_within.py)."""
        # In whole 16-byte units: Triton compiles a kernel anew when a pointer's alignment changes.
        return -(-(self.programs * PROGRAM_WORDS + num_seqs * SEQ_WORDS) // 4) * 4

    def check(self, schedule: Tensor, num_seqs: int) -> None:
        """Asserts that the schedule is contiguous int32 and long enough."""
        assert schedule.dtype == torch.int32
        assert schedule.is_contiguous()
        assert schedule.numel() >= self.words(num_seqs)

    def row_cut(self, tiles: DecodeTiles, gqa_ratio: int) -> RowCut:
        """The cut as kernels are compiled for it. tiles: those that the cut was made from"""
        return RowCut(
            ROWS=self.rows,
            GQA_RATIO=gqa_ratio,
            HEADS_PER_ROW=tiles.heads_per_row,
            HEAD_BLOCKS=tiles.head_blocks,
            BLOCK_HEADS=-(-gqa_ratio // tiles.head_blocks),
            Q_ROWS=tiles.q_rows(gqa_ratio),
            KEY_BLOCK=self.key_block,
            ROW_COST=self.row_cost,
            WINDOWED=self.window_left != UNLIMITED_WINDOW,
            TOKENS=self.tokens,
            ROW_END=self.row_end,
            SIDE_BY_SIDE=self.axes > 1,
        )

    def partials_words(self, *, gqa_ratio: int, v_head_dim: int, tiles: DecodeTiles) -> int:
        """float32 words of decode's workspace, for rows that several programs share: two parts per program."""
        words = v_head_dim + 2
        if self.merge_group:
            # Also enough for smaller steps, which are merged by a launch of their own.
            words = max(words, 2 * v_head_dim)
        return 2 * self.programs * tiles.q_rows(gqa_ratio) * words

    def segment_words(self, num_seqs: int, most_segments: int, *, q_rows: int, v_head_dim: int) -> tuple[int, int]:
        """float32 words of deterministic decode's workspace, for num_seqs padded sequences of most_segments or fewer.

        A slot of q_rows rows for each partial result: maxima and sums, in whole 16-byte units, then accumulators.
        """
        slots = num_seqs * self.rows * (most_segments + self.row_cost)
        # Triton compiles a kernel anew when a pointer's alignment changes.
        return -(-slots * q_rows * 2 // 4) * 4, slots * q_rows * v_head_dim


@dataclass(frozen=True, slots=True)
class CutByRows:
    """The cut of steps with `least` to `most` of its rows, and the tiles that it is made of."""

    cut: DecodeCut
    tiles: DecodeTiles
    least: float
    most: float

    @property
    def rows_in_words(self) -> str:
        """The numbers of rows, for descriptions of a kernel."""
        least = math.ceil(self.least)
        return f"{least} rows or more" if self.most == math.inf else f"{least} to {self.most:g} rows"


# Fewer programs of the merge leave a GPU idle; many more run one after the other. If rows have few parts, most
# programs are idle.
_MERGE_PROGRAMS, _FEW_PROGRAMS = 2048, 512


class MergeShape(NamedTuple):
    """The cut of the merge.

    by_row:     a program for each row; or for each pair of neighbouring decode programs, if rows outnumber them
    heads:      q rows of a program
    columns:    output columns of a program
    parts:      parts that are added up in one step
    num_warps:  warps of a program
    few, few_heads: rows of at most few parts are added up in one step, few_heads query heads by a program
    """

    by_row: bool
    heads: int
    columns: int
    parts: int
    num_warps: int
    few: int
    few_heads: int


def merge_shape(num_rows: int, num_programs: int, q_rows: int, v_head_dim: int) -> MergeShape:
    """The cut for num_rows rows of q_rows query heads.

    Two things count (measured on one H200): all parts of a typical row in one step, and enough programs.
    1 row, 264 parts: 45 us with 8 parts per step, 16 us with 256. 64 x 4k, 512 rows: 7.6 us with one head per program,
    3 us with all. Everything that varies with the batch has few values, so that few variants are compiled.
    """
    block = max(16, next_power_of_2(v_head_dim))
    if num_rows > num_programs:
        heads = min(next_power_of_2(q_rows), max(1, 2048 // block))
        parts = 8 if heads * block <= 1024 else 4
        return MergeShape(False, heads, block, parts, 2, parts, heads)
    # Parts of a row if all rows are alike: few rows begin where a program does.
    typical = next_power_of_2(num_programs // max(num_rows, 1) + 1)
    if typical > 32:
        # 8 rows of 133 parts: 13.5 us in three steps, 14.5 in one of eight warps.
        parts = 64 if num_rows >= 4 and typical <= 256 else min(max(typical, 64), 1024)
        return MergeShape(True, 1, min(block, 16 if parts > 512 else 32), parts, 8 if parts >= 256 else 1, parts, 1)
    if typical > 8:
        return MergeShape(True, 1, min(block, 64), typical, 2, typical, 1)
    few, most_heads = max(typical, 4), next_power_of_2(q_rows)
    of_a_program = num_rows * q_rows * block // _MERGE_PROGRAMS
    # A merge that is launched early finds room next to decode if it has one warp: 16 x 4k takes 69.6 us so and 71.1
    # with two, 64 x 4k in eight bits 140.3 and 143.1 (llama8b), 77.7 and 79.6 (gptoss).
    if of_a_program >= 256:
        # More programs, for long rows, would begin one after the other. 16 heads of latents, 128 x 4k: 155 us, and 172
        # at a commit with eight times as many.
        heads = _power_of_2_in(min(most_heads, num_rows * q_rows // _FEW_PROGRAMS, 2048 // (few * block)))
        return MergeShape(True, heads, block, few, 1, few, heads)
    # Rows are seldom alike. A row of many parts has more of them in a step, and more programs, than a typical one, of
    # which one program adds up `few` parts of more heads. Sequences of 90k and 70k next to 40 of 77 tokens, 32 x 2
    # heads of 64: 44 us if all rows are added up like typical ones, 30 so; 128 x 2k: 42, and 46 if all are like long
    # ones; 90k next to 127 of 77: 24.5. 64 x 4 of 192/128: 127 us like typical ones, 112 so.
    elements = 32 if of_a_program < 64 else 64
    columns = min(block, elements)
    heads = min(most_heads, elements // columns)
    few_heads = _power_of_2_in(min(most_heads, num_rows * q_rows // _FEW_PROGRAMS, 2048 // (few * columns)))
    return MergeShape(True, heads, columns, 2048 // (heads * columns), 1, few, max(heads, few_heads))


def _power_of_2_in(number: int) -> int:
    """The largest power of two that is at most number, and 1 for 0."""
    return 1 << max(0, number.bit_length() - 1)


class GroupShape(NamedTuple):
    """The way that the program that ends last adds up the parts of a group (merge_within.py).

    GROUP:      parts of a group; 0: a launch of its own adds up all
    LINES:      q rows of a part
    V_HEAD_DIM: columns of one
    HEADS:      q rows at a time
    COLUMNS:    columns at a time
    PARTS:      parts that are added up in one step
    """

    GROUP: int = 0
    LINES: int = 1
    V_HEAD_DIM: int = 1
    HEADS: int = 1
    COLUMNS: int = 1
    PARTS: int = 1


def group_shape(group: int, q_rows: int, v_head_dim: int, num_warps: int) -> GroupShape:
    """The shape for groups of `group` parts, which a program of num_warps warps adds up."""
    if group == 0:
        return GroupShape()
    heads, columns = min(next_power_of_2(q_rows), 8), min(max(16, next_power_of_2(v_head_dim)), 128)
    # 32 elements per thread, the ones in flight at the same time, with a maximum and a sum for each.
    parts = max(1, 32 * 32 * num_warps // (heads * columns))
    return GroupShape(group, q_rows, v_head_dim, heads, columns, min(parts, 8))


class RowSharing(NamedTuple):
    """The sharing of the longest rows of a step; a row is a query block and a KV head, or part of its heads.

    programs:     programs that share; 0: every row is one program's
    rows:         rows of a query block
    causal:       whether a row sees no key after its own
    window_left:  of the scores
    row_keys:     of the tiles: prologue, diagonal and epilogue
    split_keys:   of the tiles: a second row and the merge
    gain:         sixteenths that sharing must gain, besides split_keys: of the mean load, or with segments of a share
    least_keys:   no share is smaller
    most_keys:    none is larger: there is room for the parts of this many keys
    segment_len:  of deterministic attention, keys of a segment: programs take whole ones; else 0
    alike_keys:   of the tiles: cost, in keys, of cutting all rows alike; 0: they are not cut so
    shares_first: of deterministic attention: whether whole rows begin when all shares have ended, in a launch of their
                  own, and not as programs end
    """

    programs: int = 0
    rows: int = 1
    causal: bool = True
    window_left: int = UNLIMITED_WINDOW
    row_keys: int = 256
    split_keys: int = 384
    gain: int = 2
    least_keys: int = 256
    most_keys: int = 1 << 30  # more than any program has
    segment_len: int = 0
    alike_keys: int = 0
    shares_first: bool = False


WHOLE_ROWS = RowSharing()


class Sequences(enum.IntEnum):
    """The sequences that a schedule lists. In a masked step some may have cells of the mask, and others none."""

    ALL = 0
    WITH_CELLS = 1
    WITHOUT_CELLS = 2


# The split_keys of kernels that never split: more than any step can gain.
NEVER_SPLIT = 1 << 30


@dataclass(frozen=True, slots=True)
class ExtendCut:
    """The cut of the new tokens of an extend step; equal cuts make equal schedules for a step.

    query_tokens: new tokens of a full query block
    min_q_len:    sequences with fewer new tokens are left out; 2 if decode serves those with one, else 1
    sharing:      how the longest rows are shared out
    sequences:    those that are not left out
    """

    query_tokens: int
    min_q_len: int = 1
    sharing: RowSharing = WHOLE_ROWS
    sequences: Sequences = Sequences.ALL

    def __post_init__(self) -> None:
        assert self.min_q_len >= 1
        sharing = self.sharing
        # Rows of the padded tail have no keys. If they cost nothing, no program would take them to write their zeros,
        # and a program that comes to one would take it for the end.
        assert not sharing.programs or sharing.row_keys > 0, "a row without keys costs something, too"
        assert sharing.segment_len or not sharing.shares_first, "other attention counts with it in any case"

    @classmethod
    def of(cls, tiles: ExtendTiles, *, gqa_ratio: int, causal: bool, min_q_len: int = 1) -> ExtendCut:
        """The cut of a layer that is served with these tiles, of rows that are one program's each.

        causal: of the scores; by a packed mask a token may see its whole sequence
        """
        return cls(tiles.tokens_per_block(gqa_ratio), min_q_len, WHOLE_ROWS._replace(causal=causal))

    def shared_by(
        self, tiles: ExtendTiles, *, compute_units: int, heads: tuple[int, int], window_left: int
    ) -> ExtendCut:
        """This cut, with the longest rows shared out among the programs that run at a time, if the tiles say so.

        heads:       KV heads, and query heads that share one
        window_left: of the scores
        """
        if not tiles.programs_per_cu:
            return self
        num_kv_heads, gqa_ratio = heads
        sharing = RowSharing(
            programs=compute_units * tiles.programs_per_cu,
            rows=num_kv_heads // tiles.heads_per_row * tiles.head_blocks(gqa_ratio),
            causal=self.sharing.causal,
            window_left=window_left,
            row_keys=tiles.row_keys,
            split_keys=tiles.split_keys,
            least_keys=tiles.row_keys,
            alike_keys=tiles.alike_keys,
        )
        return replace(self, sharing=sharing)

    def by_segments(self, segment_len: int, *, most_segments: int, split_keys: int, shares_first: bool) -> ExtendCut:
        """This cut of deterministic attention: programs that share rows take whole segments, and keep each as a part.

        most_segments:            of the largest share, for which there is room
        split_keys, shares_first: of RowSharing
        """
        if not self.sharing.programs:
            return self
        sharing = self.sharing._replace(
            split_keys=split_keys,
            gain=4,
            least_keys=segment_len,
            most_keys=most_segments * segment_len,
            segment_len=segment_len,
            alike_keys=self.sharing.alike_keys if split_keys < NEVER_SPLIT else 0,
            shares_first=shares_first,
        )
        return replace(self, sharing=sharing)

    def max_blocks(self, num_tokens: int, num_seqs: int) -> int:
        """The most query blocks that num_tokens padded tokens of num_seqs padded sequences can make."""
        return num_tokens // self.query_tokens + num_seqs + 1

    def words(self, num_tokens: int, num_seqs: int) -> int:
        """int32 words of the schedule of num_tokens padded tokens and num_seqs padded sequences."""
        return self.max_blocks(num_tokens, num_seqs) * BLOCK_WORDS + self.sharing.programs * SHARE_WORDS

    def partials_words(self, *, query_rows: int, v_head_dim: int) -> int:
        """float32 words of the workspace, for rows that several programs share: two parts per program."""
        return 2 * self.sharing.programs * query_rows * (v_head_dim + 2)

    def check_layer(self, rows: int, *, causal: bool, window_left: int) -> None:
        """Asserts that the schedule shares out rows of this launch. rows: of a query block"""
        sharing = self.sharing
        of_layer = (rows, causal, window_left)
        assert (sharing.rows, sharing.causal, sharing.window_left) == of_layer, (
            "the schedule was cut for another launch"
        )

    def check(self, schedule: Tensor, num_tokens: int, num_seqs: int) -> None:
        """Asserts that the schedule is contiguous int32, long enough, and aligned to 8 bytes."""
        assert schedule.dtype == torch.int32
        assert schedule.is_contiguous()
        assert schedule.numel() >= self.words(num_tokens, num_seqs)
        assert schedule.data_ptr() % 8 == 0, "costs are 64-bit words"
