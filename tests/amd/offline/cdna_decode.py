"""Decode for CDNA, compiled for an arch, with the figures of the compiler and of the model of tile_cost.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from triton.compiler import CompiledKernel

from rocm_attn.kernels.attention.cuts import DecodeCut
from rocm_attn.kernels.cdna.decode import launch_cdna_decode
from rocm_attn.kernels.tuning.cdna_tiles import cdna_tiles
from rocm_attn.kernels.tuning.tiles import CdnaTiles, DecodeTiles, NoTiles
from rocm_attn.machine.releases import Releases
from rocm_attn.machine.target import known_target
from rocm_attn.providers.triton_cdna import LIMITS, TRITONS
from rocm_lab.cost.static_figures import CdnaFigures
from tests.amd.kernels.attention_cases import Case, build, garbage
from tests.amd.offline.code_object import read_amd_code
from tests.amd.offline.figures_of_kernels import busy_of, kernel_figures
from tests.amd.offline.hot_loop import hot_loop
from tests.amd.offline.matrix import Row
from tests.amd.offline.mca import loop_cycles
from tests.amd.offline.offline_driver import compiled_by
from tests.amd.offline.tile_candidates import Kind
from tests.amd.offline.tile_cost import cost_of_loop

# Key blocks that may be in flight; with more of them registers spill everywhere.
_BLOCKS = (1, 2, 3)
# Kinds of layer that tiles which serve have figures of.
_KINDS: dict[str, dict[str, Any]] = {"plain": {}, "window": {"window_left": 127}, "cap": {"soft_cap": 50.0}}


def tiles_of(arch: str, case: Case) -> CdnaTiles:
    """Those that serve a case. Raises NoTiles."""
    (q_heads, kv_heads), (dim, _) = case.heads, case.dims
    return cdna_tiles(arch, num_kv_heads=kv_heads, gqa_ratio=q_heads // kv_heads, head_dim=dim)


def compiled_decode(arch: str, case: Case, tiles: CdnaTiles) -> CompiledKernel:
    """The kernel of a case, with an LSE."""
    tensors = build(case, torch.device("cpu"))
    programs = known_target(arch).compute_units * tiles.programs_per_cu
    cut = DecodeCut.of(tiles, num_kv_heads=case.heads[1], programs=programs, window_left=case.window_left)
    words = cut.partials_words(gqa_ratio=tensors.gqa_ratio, v_head_dim=case.dims[1], tiles=tiles)
    args = tensors.args(garbage(cut.words(tensors.num_seqs), tensors.q.device), torch.empty(words))

    def launch() -> None:
        launch_cdna_decode(args, arch=arch, scores=tensors.scores, cut=cut, tiles=tiles)

    return next(kernel for kernel in compiled_by(launch, arch) if kernel.name == "_cdna_decode_kernel")


def figures_of(row: Row, kind: Kind) -> tuple[CdnaFigures, ...]:
    """Its figures for a layer over a pool below 2 GiB; none of extend, and of layers that it does not serve."""
    target = replace(known_target(row.arch), releases=Releases(triton=TRITONS[-1]))
    if kind is not DecodeTiles or LIMITS.refusals(row.problems[0], target):
        return ()
    case = Case([300, 200], [1, 1], heads=row.heads, dims=row.dims, dtype=row.dtype, page_size=row.page_size)
    try:
        serving = [tiles_of(row.arch, case)]
    except NoTiles:
        serving = []
    depth, heads = (16 if row.arch == "gfx942" else 32), 2 if row.dims[0] == 64 else 1
    tried = [CdnaTiles(depth, 1, blocks, 8, heads_per_row=heads) for blocks in _BLOCKS]
    found = [_figures(row, case, tiles, name) for tiles in serving for name in _KINDS]
    return (*found, *(_figures(row, case, tiles, "plain") for tiles in tried if tiles not in serving))


def _figures(row: Row, case: Case, tiles: CdnaTiles, kind: str) -> CdnaFigures:
    case = replace(case, **_KINDS[kind])
    compiled = compiled_decode(row.arch, case, tiles)
    code, loop = read_amd_code(compiled), hot_loop(compiled.asm["amdgcn"])
    cycles = loop_cycles(loop, row.arch)
    # An iteration takes all blocks that are in flight.
    iteration = replace(tiles, key_block=tiles.key_block * tiles.num_stages)
    cost = cost_of_loop(row, iteration, loop, cycles, code.waves_per_simd)
    try:
        serves = tiles == tiles_of(row.arch, case)
    except NoTiles:
        serves = False
    return CdnaFigures(kind, tiles, serves, kernel_figures(code, code.waves_per_simd, cost), busy_of(cycles))
