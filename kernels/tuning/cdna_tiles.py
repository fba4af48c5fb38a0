"""Tiles of the decode kernel for CDNA (kernels/cdna), by arch and head dim.

No AMD GPU has run them: they were chosen from what the compiler reports (no spills, registers) and from the static
model of the hot loop, as all AMD rows (tiles.py); docs/amd_tuning.md has the figures beside those of paged decode.
"""

from __future__ import annotations

from collections.abc import Mapping

from rocm_attn.kernels.tuning.tiles import DecodeTiles, NoTiles

# Keys of a chunk: what one product with K takes. A chunk lies in one page.
CHUNK = 16
# Query heads of a row, padded.
ROWS = 16

# A block is as deep as a product with V: 16 keys on CDNA 3, 32 on CDNA 4. num_stages is the blocks that are in flight.
_TILES: Mapping[tuple[str, int], DecodeTiles] = {
    ("gfx942", 64): DecodeTiles(16, 1, 2, 8, heads_per_row=2),
    ("gfx942", 128): DecodeTiles(16, 1, 2, 8),
    ("gfx942", 256): DecodeTiles(16, 1, 1, 8),
    ("gfx950", 64): DecodeTiles(32, 1, 2, 8, heads_per_row=2),
    ("gfx950", 128): DecodeTiles(32, 1, 2, 8),
    ("gfx950", 256): DecodeTiles(32, 1, 1, 8),
}

ARCHS = tuple(dict.fromkeys(arch for arch, _ in _TILES))
HEAD_DIMS = tuple(dict.fromkeys(dim for _, dim in _TILES))


def cdna_tiles(arch: str, *, num_kv_heads: int, gqa_ratio: int, head_dim: int) -> DecodeTiles:
    """The tiles of an arch of ARCHS and heads of one of HEAD_DIMS. Raises NoTiles where a row has no room for them."""
    tiles = _TILES[arch, head_dim]
    heads = tiles.heads_per_row
    if num_kv_heads % heads:
        raise NoTiles(f"it reads KV heads of {head_dim} two by two, and there are {num_kv_heads}")
    if gqa_ratio * heads > ROWS:
        raise NoTiles(f"{gqa_ratio} query heads share a KV head of {head_dim}, at most {ROWS // heads} may")
    return tiles
