"""Tiles of sparse attention: of the indexer and of attention over a selection. sparse.json has the rows."""

from dataclasses import dataclass

import torch

from rocm_attn.kernels.tuning.latent_tiles import (
    CDNA_LATENT_TILES,
    HopperLatentTiles,
    LatentTiles,
    SelectedTiles,
    latent_segment_tiles,
    that_hold,
)
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles, segment_tiles
from rocm_attn.kernels.tuning.tile_choices import TableFile, choices_of
from rocm_attn.kernels.tuning.tiles import CodeKind, ExtendTiles, NoTiles


@dataclass(frozen=True, slots=True)
class IndexTiles:
    """The way that index keys are scored.

    key_block:       index keys of a block of the loop; a unit that has more of them makes it longer
    columns:         most columns of a block of products: tokens that share a block of keys, times index heads
    num_warps:       warps (waves on AMD) of a program
    num_stages:      key blocks whose loads are in flight
    programs_per_cu: programs that a compute unit holds at a time, or a multiple of them
    """

    key_block: int
    columns: int
    num_warps: int
    num_stages: int
    programs_per_cu: int


@dataclass(frozen=True, slots=True)
class IndexerTileChoice:
    """tiles serve an arch, keys with item_bytes bytes per element, dims up to max_dim, and tokens of up to max_heads
    index heads, of all sets.

    coded_q: whether they serve queries of eight bits only
    """

    arch: str
    item_bytes: int
    max_dim: int
    tiles: IndexTiles
    max_heads: int = 128
    coded_q: bool = False


@dataclass(frozen=True, slots=True)
class SelectedTileChoice:
    """tiles serve an arch, an element size of q in bytes and head dims up to max_head_dim.

    coded:   whether they serve pages of eight bits only
    records: whether they serve records only, which then have no other rows
    """

    arch: str
    item_bytes: int
    max_head_dim: int
    tiles: SelectedTiles
    coded: bool = False
    records: bool = False


# For latents on Hopper (hopper/selected.py).
HOPPER_SELECTED_TILES = HopperLatentTiles(LatentTiles(64, 64, 4, 2), 128, 48)
# Records arrive in registers, which blocks of 64 keys spill.
HOPPER_RECORD_TILES = HopperLatentTiles(LatentTiles(64, 32, 4, 4), 96, 96)
# The first row that serves wins.
INDEXER_CHOICES = TableFile(IndexerTileChoice, "sparse.json", "index")
# Among the rows that serve, the first one whose query_rows hold the query heads of a KV head is taken, else the last.
SELECTED_CHOICES = TableFile(SelectedTileChoice, "sparse.json", "selected")


def index_tiles(arch: str, *, heads: int, dim: int, key_dtype: torch.dtype, coded_q: bool) -> IndexTiles:
    """The tiles of the indexer. heads: index heads of all sets; coded_q: q is of eight bits. Raises NoTiles."""
    for rows in choices_of(INDEXER_CHOICES, arch, key_dtype):
        for row in rows:
            if dim <= row.max_dim and heads <= row.max_heads and (coded_q or not row.coded_q):
                return row.tiles
    raise NoTiles(
        f"no tiles of an indexer for {arch} with {heads} index heads and {key_dtype} keys of {dim}; "
        f"rows exist for {', '.join(dict.fromkeys(row.arch for row in INDEXER_CHOICES))}"
    )


def selected_tiles(
    arch: str,
    *,
    gqa_ratio: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    is_coded: bool,
    is_record: bool = False,
) -> SelectedTiles:
    """The tiles of attention over a selection. Raises NoTiles.

    dtype:     of q
    is_coded:  whether pages are of eight bits
    is_record: whether their rows are records
    """
    for rows in choices_of(SELECTED_CHOICES, arch, dtype):
        largest = max(head_dim, v_head_dim)
        serving = [row for row in rows if largest <= row.max_head_dim and (is_coded or not row.coded)]
        serving = [row for row in serving if row.records and is_record] or [row for row in serving if not row.records]
        # Rows for larger dims serve if there is none for these; those for codes are whole by themselves.
        alike = [row for row in serving if row.max_head_dim == serving[0].max_head_dim]
        if tiles := [row.tiles for row in alike if row.coded == alike[0].coded]:
            return that_hold(tiles, gqa_ratio)
    raise NoTiles(
        f"no tiles of attention over a selection for {arch} with {dtype} and head dims {head_dim} and {v_head_dim}; "
        f"rows exist for {', '.join(dict.fromkeys(row.arch for row in SELECTED_CHOICES))}"
    )


# Entries of a selection on CDNA: a program's LDS has room for what it knows of as many, next to scores and weights.
CDNA_MOST_KEYS = 2048


def cdna_selected_tiles(arch: str, num_heads: int, *, is_record: bool) -> LatentTiles:
    """The tiles of CDNA's own kernel: the first of its latent decode's that hold all heads, or the last.

    Waves share records, for however few heads. With 64 heads they take more LDS than a compute unit of CDNA 3 has.
    """
    most = 32 if is_record and arch == "gfx942" else CDNA_LATENT_TILES[-1].query_rows
    tiles = [each for each in CDNA_LATENT_TILES if (32 if is_record else 1) <= each.query_rows <= most]
    return that_hold(tiles, num_heads)


def selected_segment_tiles(
    arch: str, *, dims: tuple[int, int], dtype: torch.dtype, codes: CodeKind, is_latent: bool
) -> tuple[SegmentTiles, bool]:
    """The tiles of deterministic attention over a selection, and whether weights are added up pair by pair.

    They are those of deterministic attention to all keys, which decide a result's bits. dims: head_dim, v_head_dim
    Raises NoTiles.
    """
    if not is_latent:
        return segment_tiles(arch, head_dim=dims[0], v_head_dim=dims[1], dtype=dtype, codes=codes), False
    latent = latent_segment_tiles(arch, dims=dims, dtype=dtype)
    # The decoder of the fewest rows, for any number of heads: with 32 of them sm_90 spills.
    block = latent.of_decode(1)
    tiles = SegmentTiles(
        latent.segment_len,
        block.key_block,
        block.query_rows,
        block.num_warps,
        min(block.num_stages, 2),  # with three sm_90 spills 8 bytes if latents are codes
        programs_per_cu=1,  # a grid of tokens and segments has no schedule
        extend=ExtendTiles(block.query_rows, block.key_block, block.num_warps, 1),
        matrix_dim=latent.matrix_dim,
    )
    return tiles, latent.by_pairs
