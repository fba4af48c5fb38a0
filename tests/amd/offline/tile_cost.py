"""A cost model of tiles: clocks of a compute unit per unit of work, the largest of four bounds.

A CU has 4 SIMDs. It runs as many programs at the same time as registers and LDS leave room for (and, for decode, as the
grid holds), each of num_warps waves. An iteration of the hot loop does `work` units in a program.

    issue  4 * issue cycles * num_warps / 4 / work          the busiest unit of a SIMD, by llvm-mca
    lds    bytes of all waves / 128 / work                  LDS moves 128 bytes a clock
    loads  bytes of all waves / 64 / work                   the vector memory path delivers 64 bytes a clock
    waits  4 * cycles of a wave alone / programs / work     waits that the other programs do not fill, by llvm-mca

Work is a KV token of one KV head for decode, and 1024 products of a q row and a key for extend.

No unit bounds decode: all of its rows stay below the time that HBM needs. So decode is compared by its break-even
latency, the longest that a load may take while all programs of a CU together still request data at the rate that HBM
delivers:

    (programs * work * lower bound / 4 - own cycles) / latencies in series      cycles of 4 clocks, here in microseconds

The memory latency of extend is an assumption, below. The model ignores cache misses, bank conflicts, uneven work, the
clock under load and the cost of starting a row or a tile. Nothing here was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.compiler import CompiledKernel

from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles
from rocm_lab.cost.static_figures import LoopFigures
from rocm_lab.cycles.loops import Loop
from tests.amd.offline.code_object import AmdCode
from tests.amd.offline.hot_loop import hot_loop_of, lds_bytes, loaded_bytes
from tests.amd.offline.matrix import Row
from tests.amd.offline.mca import CLOCKS_PER_CYCLE, LoopCycles, loop_cycles

# Assumed, in cycles of 4 clocks: decode reads K and V once, from HBM that all CUs load at the same time (1,600 clocks);
# the tiles of an extend step share theirs, so that most loads find it in a cache (500 clocks).
DECODE_LATENCY = 400
EXTEND_LATENCY = 125

# A loop that waits for no load would have no break-even latency.
_LEAST_LATENCIES = 0.1

_SIMDS = 4
_LANES = 64
# gfx950 reads twice as much, and writes as much as gfx942; the model takes the smaller number for both.
_LDS_BYTES_A_CLOCK = 128
_LOAD_BYTES_A_CLOCK = 64

# From the data sheets of MI300X (5.3 TB/s, 304 CUs, 2.1 GHz, 1,307 TFLOPS) and MI355X (8 TB/s, 256 CUs, 2.4 GHz,
# 2,517 TFLOPS): bytes of HBM, and operations of 16-bit matrix products, that each CU has a clock.
_HBM_BYTES_A_CLOCK = {"gfx942": 8.3, "gfx950": 13.0}
_MATRIX_OPS_A_CLOCK = {"gfx942": 2048, "gfx950": 4096}
CLOCK_GHZ = {"gfx942": 2.1, "gfx950": 2.4}
PAIRS = 1024


@dataclass(frozen=True, slots=True)
class TileCost:
    """Clocks of a CU per unit of work, see above.

    cycles:     of a wave for an iteration
    programs:   on a CU
    break_even: the latency in microseconds up to which HBM bounds decode; 0 if a unit takes longer than HBM
    """

    issue: float
    lds: float
    loads: float
    waits: float
    cycles: LoopCycles
    programs: int
    break_even: float

    @property
    def clocks(self) -> float:
        """The cost by which tiles of extend are compared."""
        return max(self.issue, self.lds, self.loads, self.waits)


def loop_figures(cost: TileCost) -> LoopFigures:
    """Returns a decode kernel's figures as static_figures.json has them."""
    units = max(round(unit, 1) for unit in (cost.issue, cost.lds, cost.loads))
    return LoopFigures(cost.programs, round(cost.cycles.own, 1), round(cost.cycles.latencies, 2), units)


def tile_cost(row: Row, tiles: DecodeTiles | ExtendTiles, kernel: CompiledKernel, waves_per_simd: int) -> TileCost:
    """Returns the cost of tiles whose kernels leave room for that many waves. Raises NoLlvmMca."""
    loop = hot_loop_of(kernel)
    return cost_of_loop(row, tiles, loop, loop_cycles(loop, row.arch), waves_per_simd)


def cost_of_loop(
    row: Row, tiles: DecodeTiles | ExtendTiles, loop: Loop, cycles: LoopCycles, waves_per_simd: int
) -> TileCost:
    """Returns the bounds from the figures of the loop."""
    num_warps, work, lanes = tiles.num_warps, work_of_iteration(tiles), tiles.num_warps * _LANES
    # The programs for which registers and LDS leave room; for decode, the grid holds no more.
    programs = max(1, waves_per_simd * _SIMDS // num_warps)
    is_decode = isinstance(tiles, DecodeTiles)
    if isinstance(tiles, DecodeTiles):
        programs = min(programs, tiles.programs_per_cu)
    units = (
        CLOCKS_PER_CYCLE * cycles.issue * num_warps / _SIMDS / work,
        lds_bytes(loop) * lanes / _LDS_BYTES_A_CLOCK / work,
        loaded_bytes(loop) * lanes / _LOAD_BYTES_A_CLOCK / work,
    )
    lower_bound = lower_bound_clocks(row, DecodeTiles if is_decode else ExtendTiles)
    spare = programs * work * lower_bound / CLOCKS_PER_CYCLE - cycles.own
    is_fed = is_decode and max(units) <= lower_bound and spare > 0
    microseconds = CLOCKS_PER_CYCLE / CLOCK_GHZ[row.arch] / 1000
    return TileCost(
        *units,
        waits=CLOCKS_PER_CYCLE * cycles.alone(DECODE_LATENCY if is_decode else EXTEND_LATENCY) / programs / work,
        cycles=cycles,
        programs=programs,
        break_even=spare / max(cycles.latencies, _LEAST_LATENCIES) * microseconds if is_fed else 0.0,
    )


def work_of_iteration(tiles: DecodeTiles | ExtendTiles) -> float:
    """Units of work that a program does in one iteration of its hot loop."""
    if isinstance(tiles, DecodeTiles):
        return tiles.key_block * tiles.heads_per_row
    return tiles.query_rows * tiles.key_block / PAIRS


def lower_bound_clocks(row: Row, kind: type[DecodeTiles] | type[ExtendTiles]) -> float:
    """The clocks that no tiles can go below: HBM for decode, the matrix units for extend; data-sheet numbers."""
    dims = sum(row.dims)
    if kind is DecodeTiles:
        return dims * row.dtype.itemsize / _HBM_BYTES_A_CLOCK[row.arch]
    return 2 * dims * PAIRS / _MATRIX_OPS_A_CLOCK[row.arch]


def room_of(codes: list[AmdCode]) -> int:
    """Waves a SIMD has room for with the most demanding of these kernels."""
    return min(code.waves_per_simd for code in codes)
