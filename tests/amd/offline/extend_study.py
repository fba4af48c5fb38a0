"""Figures of the compiler and of the model of tile_cost.py for extend in Gluon for CDNA (gluon_extend.py)."""

from __future__ import annotations

import re

import torch
from triton.compiler import CompiledKernel

from rocm_attn.kernels.tuning.tiles import ExtendTiles
from rocm_lab.cost.static_figures import Study
from tests.amd.offline.code_object import read_amd_code
from tests.amd.offline.figures_of_kernels import busy_of, kernel_figures
from tests.amd.offline.gluon_extend import StudyGeometry, launch_gluon_extend
from tests.amd.offline.hot_loop import HotLoop, hot_loop, instructions
from tests.amd.offline.matrix import Row
from tests.amd.offline.mca import loop_cycles
from tests.amd.offline.offline_driver import compiled_by
from tests.amd.offline.tile_candidates import EXTEND_LAYERS
from tests.amd.offline.tile_cost import PAIRS, Running, cost_of, programs_on_a_cu

_ROWS = (32, 64)
_KEYS = 32
_SKIP = re.compile(r"\s+s_cbranch_execz\s+(\.LBB\w+)")


# Heads of 128, in bfloat16, four query heads per KV head, on both archs: row, rows of q, lazy or not.
STUDIES = tuple(
    (row, rows, lazy) for row in EXTEND_LAYERS if row.dims == (128, 128) for rows in _ROWS for lazy in (False, True)
)


def geometry_of(arch: str, *, rows: int, lazy: bool, gqa_ratio: int = 4) -> StudyGeometry:
    """Heads of 128 in pages of 16."""
    return StudyGeometry(3 if arch == "gfx942" else 4, 128, rows, gqa_ratio, 16, lazy)


def study_of(row: Row, rows: int, lazy: bool) -> Study:
    """The figures of one of STUDIES."""
    # Compiling touches no memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    kernel = _compiled(row, geometry_of(row.arch, rows=rows, lazy=lazy))
    code, assembly = read_amd_code(kernel), kernel.asm["amdgcn"]
    loop = skipping_loop(assembly) if lazy else hot_loop(assembly)
    cycles = loop_cycles(loop, row.arch)
    running = Running(1, programs_on_a_cu(code.waves_per_simd, 1), rows * _KEYS / PAIRS)
    cost = cost_of(row, ExtendTiles, loop, cycles, running)
    return Study(row.arch, rows, lazy, kernel_figures(code, code.waves_per_simd, cost), busy_of(cycles))


def _compiled(row: Row, geometry: StudyGeometry) -> CompiledKernel:
    q_heads, kv_heads = row.heads
    q = torch.empty(64, q_heads, 128, dtype=row.dtype)
    k, v = (torch.empty(64, geometry.PAGE_SIZE, kv_heads, 128, dtype=row.dtype) for _ in range(2))
    line = torch.empty(64, dtype=torch.int32)

    def attend() -> None:
        launch_gluon_extend(q, k, v, line, torch.empty_like(q), kv_len=1024, geometry=geometry)

    (kernel,) = compiled_by(attend, row.arch)
    return kernel


def skipping_loop(assembly: str) -> HotLoop:
    """The hot loop of a wave that never rescales: up to the backward branch that skips the rescaling."""
    lines = assembly.splitlines()
    for place, line in enumerate(lines):
        if found := _SKIP.match(line):
            first = next((i for i in range(place) if lines[i].startswith(f"{found[1]}:")), place)
            loop = HotLoop(tuple(instructions(lines[first : place + 1])))
            if loop.matrix_ops == hot_loop(assembly).matrix_ops:
                return loop
    raise ValueError("no branch passes over what rescales")
