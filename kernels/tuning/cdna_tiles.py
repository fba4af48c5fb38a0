"""Tiles of the decode kernel for CDNA (kernels/cdna), by arch and head dim.

No AMD GPU has run them: they were chosen from the compiler's reports (no spills, registers) and from the static model
of the hot loop, like all AMD rows (tiles.py); docs/amd_tuning.md has the figures next to those of paged decode.
"""

from __future__ import annotations

from collections.abc import Mapping

from rocm_attn.kernels.tuning.tiles import CdnaTiles, NoTiles

# Keys of a chunk, the number that one product with K takes. A chunk lies in one page.
CHUNK = 16
# Query heads of a row, padded.
ROWS = 16

# A block is as deep as a product with V: 16 keys on CDNA 3, 32 on CDNA 4. num_stages is the blocks that are in flight.
# The time that a load may take before HBM idles, next to the tiles of paged decode (docs/amd_tuning.md):
_TILES: Mapping[tuple[str, int], CdnaTiles] = {
    # 10.9 us, 244 VGPRs; paged decode 3.4.
    ("gfx942", 64): CdnaTiles(16, 1, 3, 8, heads_per_row=2),
    ("gfx942", 128): CdnaTiles(16, 1, 3, 8),
    # 7.3 us, 240 to 248 VGPRs; 3.2. Two blocks leave a SIMD one wave.
    ("gfx942", 256): CdnaTiles(16, 1, 1, 8),
    # 7.8 us, 199 to 212 VGPRs; 3.6. Three blocks leave a SIMD one wave: 5.8.
    ("gfx950", 64): CdnaTiles(32, 1, 2, 8, heads_per_row=2),
    ("gfx950", 128): CdnaTiles(32, 1, 2, 8),
    # Heads of 256 have none on gfx950: 270 VGPRs leave a SIMD one wave (3.7 us; paged decode 3.9), and with
    # waves_per_eu up to 8 registers spill.
}

ARCHS = tuple(dict.fromkeys(arch for arch, _ in _TILES))
HEAD_DIMS = tuple(dict.fromkeys(dim for _, dim in _TILES))


def cdna_tiles(arch: str, *, num_kv_heads: int, gqa_ratio: int, head_dim: int) -> CdnaTiles:
    """The tiles of an arch of ARCHS and heads of one of HEAD_DIMS. Raises NoTiles."""
    tiles = _TILES.get((arch, head_dim))
    if tiles is None:
        raise NoTiles(f"it has no tiles for heads of {head_dim} on {arch} that gain anything")
    heads = tiles.heads_per_row
    if num_kv_heads % heads:
        raise NoTiles(f"it reads KV heads of {head_dim} two by two, and there are {num_kv_heads}")
    if gqa_ratio * heads > ROWS:
        raise NoTiles(f"{gqa_ratio} query heads share a KV head of {head_dim}, at most {ROWS // heads} may")
    return tiles
