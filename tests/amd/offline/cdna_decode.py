"""Decode for CDNA, compiled for an arch, with the figures of the model of tile_cost.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from triton.compiler import CompiledKernel

from rocm_attn.kernels.attention.cuts import DecodeCut
from rocm_attn.kernels.tuning.tiles import CdnaTiles, NoTiles
from rocm_attn.machine.releases import Releases
from rocm_attn.machine.target import known_target
from rocm_attn.providers.triton_cdna import LIMITS, TRITONS
from rocm_lab.cost.static_figures import CDNA, DecodeFigures
from tests.amd.kernels.attention_cases import Case, build, garbage
from tests.amd.kernels.cdna_cases import launch_cdna_decode, tiles_of_case
from tests.amd.offline.code_object import read_amd_code
from tests.amd.offline.hot_loop import hot_loop_of
from tests.amd.offline.matrix import Row
from tests.amd.offline.mca import loop_cycles
from tests.amd.offline.offline_driver import compiled_by
from tests.amd.offline.tile_cost import cost_of_loop, loop_figures

# Kinds of layer that tiles which serve have figures of.
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "window": {"window_left": 127}, "cap": {"soft_cap": 50.0}}


def compiled_decode(arch: str, case: Case, tiles: CdnaTiles) -> CompiledKernel:
    tensors = build(case, torch.device("cpu"))
    programs = known_target(arch).compute_units * tiles.programs_per_cu
    cut = DecodeCut.of(tiles, num_kv_heads=case.heads[1], programs=programs, window_left=case.window_left)
    words = cut.partials_words(gqa_ratio=tensors.gqa_ratio, v_head_dim=case.dims[1], tiles=tiles)
    args = tensors.args(garbage(cut.words(tensors.num_seqs), tensors.q.device), torch.empty(words))

    def launch() -> None:
        launch_cdna_decode(args, arch=arch, scores=tensors.scores, cut=cut, tiles=tiles)

    return next(kernel for kernel in compiled_by(launch, arch) if kernel.name == "_cdna_decode_kernel")


def figures_of(row: Row) -> tuple[DecodeFigures, ...]:
    """Its figures for each kind of a layer over a pool below 2 GiB, in the tiles that serve; none if it serves none."""
    target = replace(known_target(row.arch), releases=Releases(triton=TRITONS[-1]))
    case = Case([300, 200], [1, 1], heads=row.heads, dims=row.dims, dtype=row.dtype, page_size=row.page_size)
    if LIMITS.refusals(row.problems[0], target):
        return ()
    try:
        tiles = tiles_of_case(row.arch, case)
    except NoTiles:
        return ()
    return tuple(_figures(row, replace(case, **changes), tiles, kind) for kind, changes in KINDS.items())


def _figures(row: Row, case: Case, tiles: CdnaTiles, kind: str) -> DecodeFigures:
    compiled = compiled_decode(row.arch, case, tiles)
    code, loop = read_amd_code(compiled), hot_loop_of(compiled)
    cost = cost_of_loop(row, tiles, loop, loop_cycles(loop, row.arch), code.waves_per_simd)
    return DecodeFigures(CDNA, row.arch, row.dims[0], kind, tiles, loop_figures(cost))
