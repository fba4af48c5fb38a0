"""Decode for CDNA, compiled for an arch, and what the compiler and the model of tile_cost.py say of it."""

from __future__ import annotations

from dataclasses import replace

import torch
from triton.compiler import CompiledKernel

from rocm_attn.cli.static_figures import Peer
from rocm_attn.kernels.attention.cuts import DecodeCut
from rocm_attn.kernels.cdna.decode import launch_cdna_decode
from rocm_attn.kernels.tuning.cdna_tiles import cdna_tiles
from rocm_attn.kernels.tuning.tiles import DecodeTiles, NoTiles
from rocm_attn.machine.releases import Releases
from rocm_attn.machine.target import known_target
from rocm_attn.providers.triton_cdna import LIMITS, TRITONS
from tests.amd.kernels.attention_cases import Case, build, garbage
from tests.amd.offline.code_object import read_amd_code
from tests.amd.offline.figures_of_kernels import busy_of, kernel_figures
from tests.amd.offline.hot_loop import hot_loop
from tests.amd.offline.matrix import Row
from tests.amd.offline.mca import loop_cycles
from tests.amd.offline.offline_driver import compiled_by
from tests.amd.offline.tile_candidates import Kind
from tests.amd.offline.tile_cost import cost_of_loop


def tiles_of(arch: str, case: Case) -> DecodeTiles:
    """Those that serve a case. Raises NoTiles."""
    (q_heads, kv_heads), (dim, _) = case.heads, case.dims
    return cdna_tiles(arch, num_kv_heads=kv_heads, gqa_ratio=q_heads // kv_heads, head_dim=dim)


def compiled_decode(arch: str, case: Case) -> CompiledKernel:
    """The kernel of a case, with an LSE, in the tiles that serve it."""
    tensors, tiles = build(case, torch.device("cpu")), tiles_of(arch, case)
    programs = known_target(arch).compute_units * tiles.programs_per_cu
    cut = DecodeCut.of(tiles, num_kv_heads=case.heads[1], programs=programs, window_left=case.window_left)
    words = cut.partials_words(gqa_ratio=tensors.gqa_ratio, v_head_dim=case.dims[1], tiles=tiles)
    args = tensors.args(garbage(cut.words(tensors.num_seqs), tensors.q.device), torch.empty(words))

    def launch() -> None:
        launch_cdna_decode(args, arch=arch, scores=tensors.scores, cut=cut, tiles=tiles)

    return next(kernel for kernel in compiled_by(launch, arch) if kernel.name == "_cdna_decode_kernel")


def figures_of(row: Row, kind: Kind) -> tuple[Peer, ...]:
    """Its figures for a layer over a pool below 2 GiB; none of extend, and of layers that it does not serve."""
    target = replace(known_target(row.arch), releases=Releases(triton=TRITONS[-1]))
    case = Case([300, 200], [1, 1], heads=row.heads, dims=row.dims, dtype=row.dtype, page_size=row.page_size)
    if kind is not DecodeTiles or LIMITS.refusals(row.problems[0], target):
        return ()
    try:
        tiles = tiles_of(row.arch, case)
    except NoTiles:
        return ()
    compiled = compiled_decode(row.arch, case)
    code, loop = read_amd_code(compiled), hot_loop(compiled.asm["amdgcn"])
    cycles = loop_cycles(loop, row.arch)
    # An iteration takes all blocks that are in flight.
    iteration = replace(tiles, key_block=tiles.key_block * tiles.num_stages)
    cost = cost_of_loop(row, iteration, loop, cycles, code.waves_per_simd)
    name = f"triton.cdna_decode: {tiles.key_block} keys, {tiles.num_stages} in flight, 1 warp"
    return (Peer(name, kernel_figures(code, code.waves_per_simd, cost), busy_of(cycles)),)
