"""The tiles that a tuning choice for gfx942 or gfx950 is chosen from, with the compiler's and the model's figures.

Each row for 2-byte elements is ranked, on the widest layer that it serves. float32 and the deterministic rows only have
to pass the compile gate.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from triton.runtime.errors import OutOfResources

from rocm_attn.kernels.tuning.decode_tiles import decode_tiles
from rocm_attn.kernels.tuning.extend_tiles import extend_tiles
from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles
from tests.amd.offline.candidate_kernels import other_kernels, plain_kernel
from tests.amd.offline.code_object import AmdCode, read_amd_code
from tests.amd.offline.compiling import AMD_ARCHS
from tests.amd.offline.matrix import Row
from tests.amd.offline.mca import Unfinished
from tests.amd.offline.tile_cost import TileCost, lower_bound_clocks, room_of, tile_cost

# A row may cost this much more than its cheapest candidate: the model is not more exact than that.
TOLERANCE = 0.1
# More programs than that on a CU make the partial results of split rows a cost of their own; of one wave each they are
# half as many again as four of four waves would leave.
MAX_PROGRAMS_PER_CU = {1: 8, 2: 4, 4: 4}
# Rows of a query block, and the waves that share them. Blocks of 256 rows, which save up to 13 % here, are left out: a
# step with few new tokens pays for rows that it does not have.
_QUERY_ROWS = ((64, 4), (128, 4), (128, 8))
# Candidates of a layer that are compiled as a whole and kept, in addition to the row that serves.
KEPT = 6

# For each decode row of 2-byte elements a layer of the widest heads that it serves; some meet every extend row too.
_EXTENDED = (((64, 8), (64, 64)), ((32, 8), (128, 128)), ((8, 4), (256, 256)))
_DECODED = (*_EXTENDED, ((32, 1), (128, 128)), ((32, 1), (256, 256)))
DECODE_LAYERS, EXTEND_LAYERS = (
    tuple(Row(arch, heads, dims, torch.bfloat16, page_size=16) for arch in AMD_ARCHS for heads, dims in layers)
    for layers in (_DECODED, _EXTENDED)
)
Tiles = DecodeTiles | ExtendTiles
Kind = type[DecodeTiles] | type[ExtendTiles]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The result for a candidate.

    code:    the kernel of the plain layer; None if it does not fit the arch
    waves:   waves a SIMD has room for, with the most demanding of the candidate's kernels
    spills:  registers spilled in the kernels that were compiled, the last one of which may be the first to spill
    cost:    None if a register is spilled, or llvm-mca does not finish
    """

    tiles: Tiles
    code: AmdCode | None
    waves: int
    spills: int
    cost: TileCost | None

    @property
    def order(self) -> float:
        """The key that orders candidates, the best first; infinite if there is no cost.

        Extend: clocks. Decode, which no unit of a CU bounds: break-even latencies per microsecond, or infinite if a
        SIMD has one wave. Then nothing fills its waits for LDS and products, of which llvm-mca knows little.
        """
        if self.cost is None:
            return float("inf")
        if isinstance(self.tiles, ExtendTiles):
            return self.cost.clocks
        return 1 / self.cost.break_even if self.cost.break_even and self.waves > 1 else float("inf")


@dataclass(frozen=True, slots=True)
class Ranking:
    """The best candidates of one kind for a layer, and the row that serves, the best first."""

    row: Row
    kind: Kind
    chosen: Estimate
    candidates: tuple[Estimate, ...]

    @property
    def best(self) -> Estimate:
        return self.candidates[0]

    @property
    def excess(self) -> float:
        """The relative excess of the chosen tiles over the best; infinite if they spill.

        Extend that is cheaper than the lower bound is not better: the matrix units bound it there.
        """
        lower_bound = lower_bound_clocks(self.row, self.kind) if self.kind is ExtendTiles else 0.0
        return max(self.chosen.order, lower_bound) / max(self.best.order, lower_bound) - 1


def layers() -> Iterator[tuple[Row, Kind]]:
    """Yields the ranked layers, decode first."""
    yield from ((row, DecodeTiles) for row in DECODE_LAYERS)
    yield from ((row, ExtendTiles) for row in EXTEND_LAYERS)


def rank(row: Row, kind: Kind) -> Ranking:
    """Compiles and costs the candidates for a layer: the plain kernel of each, and all kernels of the best KEPT.

    A candidate's other kernels can only make it worse: they spill, or leave room for fewer waves. So they are compiled
    from the best plain kernel on, until no other candidate can be among the best. Raises NoLlvmMca.
    """
    chosen = estimate(row, chosen_tiles(row, kind), whole=True, given_programs=True)
    shapes = decode_shapes(row) if kind is DecodeTiles else extend_shapes(row)
    plain = [estimate(row, tiles, whole=False) for tiles in shapes]
    # Ordered by the known figures, then by place; the last value is true if all kernels were compiled.
    open_ones = [(found.order, place, False) for place, found in enumerate(plain)]
    heapq.heapify(open_ones)
    kept: list[Estimate] = []
    while open_ones and len(kept) < KEPT:
        order, place, is_whole = heapq.heappop(open_ones)
        if math.isinf(order):
            break
        if is_whole:
            kept.append(plain[place])
            continue
        plain[place] = estimate(row, plain[place].tiles, whole=True)
        heapq.heappush(open_ones, (plain[place].order, place, True))
    others = [found for found in kept if found.tiles != chosen.tiles]
    return Ranking(row, kind, chosen, tuple(sorted([chosen, *others], key=lambda found: found.order)))


def chosen_tiles(row: Row, kind: Kind) -> Tiles:
    """Returns the tiles that the tuning choices give the layer."""
    problem = row.problems[0]
    tiles_for = decode_tiles if kind is DecodeTiles else extend_tiles
    return tiles_for(
        row.arch,
        gqa_ratio=problem.gqa_ratio,
        num_kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
        v_head_dim=problem.v_head_dim,
        dtype=problem.dtype,
    )


def decode_shapes(row: Row) -> Iterator[DecodeTiles]:
    """Yields decode candidates; programs_per_cu follows from the room that each leaves."""
    ratio, (head_dim, v_head_dim) = row.problems[0].gqa_ratio, row.dims
    pairs = (1, 2) if head_dim == v_head_dim == 64 and ratio <= 8 else (1,)
    chosen = chosen_tiles(row, DecodeTiles)
    assert isinstance(chosen, DecodeTiles)
    waves = [(warps, transposed) for warps in MAX_PROGRAMS_PER_CU for transposed in (False, True)]
    # Turned over, fewer waves than four hold so much of the accumulator that none was ever near the best.
    waves.remove((1, True))
    waves.remove((2, True))
    for (warps, transposed), heads, stages, key_block in itertools.product(waves, pairs, (1, 2), (16, 32, 64)):
        yield DecodeTiles(key_block, warps, stages, 1, transposed, heads, chosen.head_blocks)


def extend_shapes(row: Row) -> Iterator[ExtendTiles]:
    """Yields extend candidates, which share out rows like the row that serves."""
    chosen = chosen_tiles(row, ExtendTiles)
    assert isinstance(chosen, ExtendTiles)
    dim_blocks = (0, 64) if max(row.dims) > 64 else (0,)
    for (query_rows, warps), key_block, stages, waves, dim_block in itertools.product(
        _QUERY_ROWS, (16, 32, 64), (1, 2), (0, 2), dim_blocks
    ):
        tiles = replace(chosen, query_rows=query_rows, key_block=key_block, num_warps=warps, num_stages=stages)
        yield replace(tiles, waves_per_eu=waves, dim_block=dim_block)


def estimate(row: Row, tiles: Tiles, *, whole: bool, given_programs: bool = False) -> Estimate:
    """Compiles and costs one candidate, by its plain kernel alone or as a whole.

    Unless given_programs, decode gets as many programs as fit a CU.
    """
    try:
        kernel = plain_kernel(row, tiles)
        codes = [read_amd_code(kernel)]
        for compiled in other_kernels(row, tiles) if whole else ():
            if spilled(codes):
                break  # It is out, regardless of the others.
            codes.append(read_amd_code(compiled))
    except OutOfResources:
        return Estimate(tiles, None, 0, 0, None)
    waves, spills = room_of(codes), spilled(codes)
    if isinstance(tiles, DecodeTiles) and not given_programs:
        programs = min(MAX_PROGRAMS_PER_CU[tiles.num_warps], waves * 4 // tiles.num_warps)
        tiles = replace(tiles, programs_per_cu=max(1, programs))
    try:
        cost = None if spills else tile_cost(row, tiles, kernel, waves)
    except Unfinished:
        cost = None
    return Estimate(tiles, codes[0], waves, spills, cost)


def spilled(codes: list[AmdCode]) -> int:
    """Registers that these kernels spill; an array that is indexed at run time is no better and counts as well."""
    return sum(code.vgpr_spills + code.sgpr_spills + code.scratch_bytes // 4 for code in codes)
