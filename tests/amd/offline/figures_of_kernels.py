"""Figures of the compiler and of the model of tile_cost.py for one kernel, as values of static_figures.json."""

from __future__ import annotations

from rocm_lab.cost.static_figures import Busy, KernelFigures
from tests.amd.offline.code_object import AmdCode
from tests.amd.offline.mca import LoopCycles
from tests.amd.offline.tile_cost import TileCost


def kernel_figures(code: AmdCode, waves: int, cost: TileCost) -> KernelFigures:
    """Returns the figures of one kernel. waves: the number that a SIMD has room for"""
    return KernelFigures(
        vgprs=code.vgprs,
        spilled=code.vgpr_spills,
        lds_bytes=code.lds_bytes,
        waves=waves,
        programs=cost.programs,
        own=round(cost.cycles.own, 1),
        latencies=round(cost.cycles.latencies, 2),
        issue=round(cost.issue, 1),
        lds=round(cost.lds, 1),
        loads=round(cost.loads, 1),
        waits=round(cost.waits, 1),
        break_even=round(cost.break_even, 2),
    )


def busy_of(cycles: LoopCycles) -> Busy:
    """Returns the cycles of the matrix and the vector unit in a loop, rounded."""
    return Busy(round(cycles.matrix, 1), round(cycles.vector, 1))
