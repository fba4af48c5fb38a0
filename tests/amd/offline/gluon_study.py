"""What the compiler and the model of tile_cost.py say of the study in gluon_kernels.py, beside the rows that serve."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from rocm_attn.cli.static_figures import Peer
from rocm_attn.kernels.tuning.tiles import DecodeTiles
from tests.amd.offline.code_object import read_amd_code
from tests.amd.offline.figures_of_kernels import busy_of, kernel_figures
from tests.amd.offline.gluon_kernels import HEAD_DIMS, PAGE, ROWS, StudyGeometry, launch_gluon_decode
from tests.amd.offline.hot_loop import hot_loop
from tests.amd.offline.matrix import Row
from tests.amd.offline.mca import loop_cycles
from tests.amd.offline.offline_driver import offline
from tests.amd.offline.tile_candidates import MAX_PROGRAMS_PER_CU, Kind
from tests.amd.offline.tile_cost import Running, cost_of, programs_on_a_cu

CDNA = {"gfx942": 3, "gfx950": 4}
_BLOCKS = (1, 2, 3)
_SEQS, _KV_LEN = 2, 4096


def studies_of(row: Row, kind: Kind) -> tuple[Peer, ...]:
    """Figures of the study for a layer, with each number of blocks in flight that spills nothing; none of extend."""
    head_dim, v_head_dim = row.dims
    is_served = head_dim == v_head_dim and head_dim in HEAD_DIMS and row.problems[0].gqa_ratio <= ROWS
    return tuple(_studies(row)) if kind is DecodeTiles and is_served else ()


def _studies(row: Row) -> Iterator[Peer]:
    for blocks in _BLOCKS:
        geometry = StudyGeometry.of(CDNA[row.arch], row.dims[0], row.problems[0].gqa_ratio, blocks)
        compiled = _compiled(row, blocks)
        code, loop = read_amd_code(compiled), hot_loop(compiled.asm["amdgcn"])
        if code.vgpr_spills or code.scratch_bytes:
            continue
        programs = min(MAX_PROGRAMS_PER_CU[1], programs_on_a_cu(code.waves_per_simd, 1))
        keys = geometry.PAGES * PAGE
        cycles = loop_cycles(loop, row.arch)
        cost = cost_of(row, DecodeTiles, loop, cycles, Running(1, programs, keys * blocks))
        name = f"gluon decode: {keys} keys, {blocks} in flight, 1 warp"
        yield Peer(name, kernel_figures(code, code.waves_per_simd, cost), busy_of(cycles))


def _compiled(row: Row, blocks: int) -> CompiledKernel:
    """The kernel, over a pool below 2 GiB."""
    kernels: list[CompiledKernel] = []
    run = JITFunction.run

    def kept(function: object, *args: object, **named: object) -> object:
        kernels.append(run(function, *args, **named))
        return kernels[-1]

    (q_heads, kv_heads), dim = row.heads, row.dims[0]
    q = torch.empty(_SEQS, q_heads, dim, dtype=torch.bfloat16)
    pages = torch.empty(_SEQS * _KV_LEN // PAGE, PAGE, kv_heads, dim, dtype=torch.bfloat16)
    table = torch.empty(_SEQS, _KV_LEN // PAGE, dtype=torch.int32)
    lengths = torch.empty(_SEQS, dtype=torch.int32)
    with offline(row.arch), mock.patch.object(JITFunction, "run", kept):
        launch_gluon_decode(q, pages, pages, table, lengths, torch.empty_like(q), cdna=CDNA[row.arch], blocks=blocks)
    return kernels[0]
