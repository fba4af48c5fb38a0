"""Tiles of the extend kernel for Hopper (kernels/hopper), by head dim. hopper.json has the rows."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rocm_attn.kernels.tuning.segment_tiles import parts_words, slots_of
from rocm_attn.kernels.tuning.tile_choices import TableFile
from rocm_attn.kernels.tuning.tiles import ExtendTiles


@dataclass(frozen=True, slots=True)
class HopperTiles:
    """The cut of new tokens and KV.

    extend:   query blocks of two groups of 64 rows, of num_warps each; num_stages key blocks of K and of V in flight
    overlaps: whether products with V run under those of the next key block with K, which takes registers
    registers, decoder_registers: of a thread of a consumer, and of the group that decodes codes, if there is one; the
              warps that load pages have the rest
    code_tiles: key blocks of K or of V whose codes are in flight; 0: pages are in q's dtype
    segment_len: in deterministic attention, as in SegmentTiles; else 0
    value_keys: keys of a tile of V, a key block's or half of them; 0: all. In deterministic attention the softmax takes
              this many at a time
    value_tiles: tiles of V in flight; 0: those of num_stages key blocks
    most_segments: in deterministic attention, segments of the largest share of a program, whose workspace holds them
    left_in_workspace: in deterministic attention, whether everything left of a segment is in the workspace: shared
              memory has no room for it next to the rings
    v_dim_block: columns of the blocks that rows of V are cut into; 0: like those of K
    open_middle: keys of a window or a chunk from which on steps that all rows see have a loop of their own, without
              masks; 0: never. Otherwise one loop has all steps, and asks of each whether to mask it. 40 x 8 heads of
              128, 4096 new, a window of 1024: one loop 170 us, three 194; 2048 new of 16k, chunks of 8192: 503 and 447;
              4096 new of 16k, windows of 4096, 16 x 8 of 128 with a cap: 280 and 258; 64 x 8 of 64: 676 and 656; 32 x 8
              of 96 406 and 421, of 192 739 and 782; 16 x 8 of 256 441 and 460
    powers_by_products: how many of four exponentials of scores with a cap are computed by products (hopper/powers.py)
    scales_seldom: whether warps with nothing to scale skip it. A row's maximum is then raised seldom (softmax.py), like
              always in deterministic attention, whose bits do not depend on tiles. llama8b 1 x 2048 new + 6144:
              350 us, 361 without; + 30720: 1448 and 1517. Heads of 80 (777 new of 5778) and of 256 (1 x 2048 + 6144)
              lose by it: 110 and 105, 367 and 354
    """

    extend: ExtendTiles
    overlaps: bool
    registers: int
    decoder_registers: int = 0
    code_tiles: int = 0
    segment_len: int = 0
    value_keys: int = 0
    value_tiles: int = 0
    most_segments: int = 0
    left_in_workspace: bool = False
    powers_by_products: int = 0
    open_middle: int = 0
    scales_seldom: bool = False
    v_dim_block: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for fields that exclude each other: a file may hold any."""
        # The warp that loads V waits for the keys of steps that K's ring holds (hopper/rings.py).
        if self.value_tiles * self.value_block > self.extend.num_stages * self.extend.key_block:
            raise ValueError("V's ring holds more steps than K's")

    @property
    def producer_registers(self) -> int:
        """The registers that the other warp groups leave of an SM's for a thread of each, in units of eight."""
        return (512 if self.code_tiles else 504) - 2 * self.registers - self.decoder_registers

    @property
    def value_block(self) -> int:
        """Keys of a tile of V."""
        return self.value_keys or self.extend.key_block

    @property
    def value_stages(self) -> int:
        """Tiles that V's ring holds."""
        return self.value_tiles or self.extend.num_stages * (self.extend.key_block // self.value_block)

    @property
    def most_keys(self) -> int:
        """Keys of the largest share of a program, in deterministic attention."""
        return self.most_segments * self.segment_len

    @property
    def segment_slots(self) -> int:
        """Parts of rows that a program has room for, in deterministic attention."""
        return slots_of(self.most_segments)

    def segment_words(self, *, programs: int, v_head_dim: int) -> int:
        """float32 words of deterministic attention's workspace: parts of rows with their sums, and everything left of a
        segment.
        """
        lines = programs * self.extend.query_rows
        left = lines * padded_dim(v_head_dim) if self.left_in_workspace else 0
        return parts_words(lines, slots=self.segment_slots, v_head_dim=v_head_dim) + left


# Keys of the smallest box that TMA loads; for codes it is 8. llama8b 1 x 2048 + 6144, pages of 8: by TMA 421 us,
# gathered 392; of 16: 384 and 389. With heads of 64 598 and 562, 544 and 569.
LEAST_BOX = 16


@dataclass(frozen=True, slots=True)
class _HopperTileChoice:
    """The largest rows that are served, of K and of V. v_head_dim 0: V like K"""

    head_dim: int
    tiles: HopperTiles
    v_head_dim: int = 0


def _by_dims(table: str) -> dict[tuple[int, int], HopperTiles]:
    rows = TableFile(_HopperTileChoice, "hopper.json", table)
    return {(row.head_dim, row.v_head_dim or row.head_dim): row.tiles for row in rows}


# Measured on one H200, torch 2.11, Triton 3.6; the cost of cutting rows alike not for pages whose keys are gathered.
_EXTEND_TILES = _by_dims("boxes")
# Other tiles for pages whose keys are gathered, and for deterministic attention over all pages.
_GATHERED_TILES = {**_EXTEND_TILES, **_by_dims("gathered")}

# For eight-bit pages.
_CODED_TILES = _by_dims("codes")
# In deterministic attention; segments and key blocks are those of decode (segment.json).
_SEGMENT_TILES = _by_dims("segment")

_CODED_SEGMENT_TILES = _by_dims("segment_codes")

DIMS = tuple(_EXTEND_TILES)
HEAD_DIMS = tuple(dim for dim, v_head_dim in DIMS if dim == v_head_dim)
CODED_SEGMENT_DIMS = tuple(_CODED_SEGMENT_TILES)


def padded_dim(head_dim: int) -> int:
    """Columns of a row of heads in shared memory, whole swizzled tiles of 128 bytes.

    Those after the head are zeros, or not read.
    """
    return -(-head_dim // 64) * 64


def hopper_tiles(head_dim: int, v_head_dim: int, page_size: int, *, coded: bool) -> HopperTiles:
    """The tiles of heads of up to HEAD_DIMS. coded: whether pages are of eight bits"""
    tiles = _CODED_TILES if coded else _GATHERED_TILES if is_gathered(page_size) else _EXTEND_TILES
    return tiles[_least_dims(tiles, head_dim, v_head_dim)]


def _least_dims(rows: Iterable[tuple[int, int]], head_dim: int, v_head_dim: int) -> tuple[int, int]:
    """The first dims, the smallest ones, that serve those of heads."""
    return next(dims for dims in rows if head_dim <= dims[0] and v_head_dim <= dims[1])


def is_gathered(page_size: int) -> bool:
    """True if pages in q's dtype hold no boxes of LEAST_BOX keys, so that keys are copied one by one."""
    return page_size % LEAST_BOX > 0


def hopper_segment_tiles(head_dim: int, v_head_dim: int, page_size: int, *, coded: bool) -> HopperTiles:
    """The tiles of deterministic attention, for heads of up to HEAD_DIMS, of codes up to CODED_SEGMENT_DIMS.

    coded: whether pages are of eight bits
    """
    if coded:
        return _CODED_SEGMENT_TILES[_least_dims(_CODED_SEGMENT_TILES, head_dim, v_head_dim)]
    dims = _least_dims(_SEGMENT_TILES, head_dim, v_head_dim)
    tiles = _SEGMENT_TILES[dims]
    return replace(tiles, registers=_GATHERED_TILES[dims].registers) if is_gathered(page_size) else tiles
