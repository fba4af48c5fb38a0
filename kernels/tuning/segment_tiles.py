"""Tiles of deterministic attention: segments, and how decode and extend walk them. segment.json has the rows.

segment_len, key_block and matrix_dim decide a result's bits and are therefore common to decode and extend. If no matrix
unit computes the products, and on "sm_", a sum's order follows from the query block's shape: decode_rows is query_rows
there, with the same warps. No row was measured on AMD.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rocm_attn.kernels.tuning.tile_choices import TableFile, choices_of
from rocm_attn.kernels.tuning.tiles import CodeKind, DecodeTiles, ExtendTiles, NoTiles, no_tile_choice


def slots_of(most_segments: int) -> int:
    """Parts of rows that a program has room for, if its share has at most most_segments segments: one of a row that
    goes on, and segments of a row begun earlier, of which a share may have the end of one more.
    """
    return most_segments + 2 if most_segments else 0


def parts_words(lines: int, *, slots: int, v_head_dim: int) -> int:
    """float32 words of `slots` parts of `lines` lines each: accumulators, maximum and sum."""
    return lines * slots * (v_head_dim + 2)


@dataclass(frozen=True, slots=True)
class SegmentTiles:
    """The cut of KV into segments, and the way that programs walk them.

    segment_len:      KV tokens in a segment, a multiple of key_block; segment m is [m, m + 1) * segment_len
    key_block:        keys of a block of the loop
    decode_rows:      rows of decode's q block, of which one for each query head of a KV head is used
    decode_warps, decode_stages: warps of a decode program, key blocks whose loads are in flight
    programs_per_cu:  decode programs for each compute unit
    extend:           how extend cuts new tokens; its key_block is the one above
    matrix_dim:       rows of a matrix instruction that AMD's compiler must use; 0: its own choice, and elsewhere
    early:            whether launches of decode may begin while the one before still runs (tiles.py)
    short:            how extend cuts the new tokens of steps whose sequences have few, if not like others. Rows meet
                      the same matrix instructions, so no bit shows which tiles served
    shared_segments:  if extend's rows are shared out, segments of the largest share of a program, whose workspace holds
                      them
    left_in_memory:   whether extend keeps the accumulators left of a segment in its workspace: registers do not hold
                      them together with those of the segment
    """

    segment_len: int
    key_block: int
    decode_rows: int
    decode_warps: int
    decode_stages: int
    programs_per_cu: int
    extend: ExtendTiles
    matrix_dim: int = 0
    early: bool = False
    short: tuple[ExtendTiles, ...] = ()
    shared_segments: int = 4
    left_in_memory: bool = False

    def __post_init__(self) -> None:
        assert self.segment_len % self.key_block == 0
        assert all(tiles.key_block == self.key_block for tiles in (*self.short, self.extend))

    def decode(self, gqa_ratio: int) -> DecodeTiles:
        """The tiles by which decode's schedule is cut: its key blocks are segments."""
        return DecodeTiles(
            key_block=self.segment_len,
            num_warps=self.decode_warps,
            num_stages=self.decode_stages,
            programs_per_cu=self.programs_per_cu,
            head_blocks=-(-gqa_ratio // self.decode_rows),
            # A program's share is a few segments: the start of a row, counted as one more, would unbalance them.
            row_cost=0,
        )

    def of_short_steps(self, gqa_ratio: int) -> tuple[SegmentTiles, ...]:
        """The tiles for steps whose sequences have few new tokens, the fewest first."""
        return tuple(replace(self, extend=tiles, short=()) for tiles in self.short if gqa_ratio <= tiles.query_rows)

    def of_masked_steps(self) -> SegmentTiles:
        """Tiles for masked steps on NVIDIA: half of extend's rows, as bits take registers, but no fewer than decode's.

        Fewer would use other matrix instructions than decode's, and so give other bits.
        """
        # With all rows sm_90 spills 24 bytes at a head dim of 128.
        query_rows = max(self.decode_rows, self.extend.query_rows // 2)
        # Two groups of four warps compute the same scores, in the same order.
        num_warps = 8 if query_rows >= 64 else self.extend.num_warps
        return replace(self, extend=replace(self.extend, query_rows=query_rows, num_warps=num_warps), short=())

    def options(self) -> dict[str, int]:
        """Launch options that decode and extend have in common."""
        return {"matrix_instr_nonkdim": self.matrix_dim} if self.matrix_dim else {}

    @property
    def segment_slots(self) -> int:
        """Parts of rows that a program of extend has room for."""
        return slots_of(self.shared_segments)

    def extend_words(self, blocks: int, *, programs: int, num_kv_heads: int, gqa_ratio: int, v_head_dim: int) -> int:
        """float32 words of extend's workspace, for this many query blocks and programs that share rows."""
        extend = self.extend
        if programs:
            return parts_words(programs * extend.query_rows, slots=self.segment_slots, v_head_dim=v_head_dim)
        if not self.left_in_memory:
            return 0
        columns = extend.columns(v_head_dim)
        row_words = -(-v_head_dim // columns) * columns
        return blocks * num_kv_heads * extend.head_blocks(gqa_ratio) * extend.query_rows * row_words

    def most_segments(self, max_kv_len: int, window_left: int) -> int:
        """The most segments that a token of a sequence of up to max_kv_len tokens sees; window_left -1: no window."""
        segments = -(-max_kv_len // self.segment_len)
        return segments if window_left < 0 else min(segments, window_left // self.segment_len + 2)


@dataclass(frozen=True, slots=True)
class SegmentTileChoice:
    """tiles serve an arch, an element size in bytes and head dims up to max_head_dim; codes: allowed for K and V."""

    arch: str
    item_bytes: int
    max_head_dim: int
    tiles: SegmentTiles
    codes: tuple[CodeKind, ...] = tuple(CodeKind)


# The first row that serves wins.
SEGMENT_ROWS = TableFile(SegmentTileChoice, "segment.json", "segment")


def segment_tiles(
    arch: str, *, head_dim: int, v_head_dim: int, dtype: torch.dtype, codes: CodeKind = CodeKind.NONE
) -> SegmentTiles:
    """The tiles of deterministic decode and extend. Raises NoTiles."""
    for rows in choices_of(SEGMENT_ROWS, arch, dtype):
        for row in rows:
            if codes in row.codes and max(head_dim, v_head_dim) <= row.max_head_dim:
                return row.tiles
    raise NoTiles(no_tile_choice("deterministic", SEGMENT_ROWS, arch, dtype, (head_dim, v_head_dim), codes))
