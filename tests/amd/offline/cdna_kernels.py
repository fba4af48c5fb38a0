"""Kernels for CDNA, compiled for an arch, and the work of the loops of latent decode for the rows that they read."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.compiler import CompiledKernel

from rocm_attn.kernels.attention.cuts import DecodeCut
from rocm_attn.kernels.tuning.tiles import CdnaTiles
from rocm_attn.machine.target import known_target
from rocm_attn.providers.triton_later import cdna_launches
from rocm_lab.cycles.traffic import LoopTraffic, loop_traffic
from rocm_lab.simulator.assembly import parse_assembly
from tests.amd.kernels.attention_cases import Case, build, garbage
from tests.amd.kernels.cdna_extend_cases import cdna_extend_cut
from tests.amd.kernels.cdna_latent_cases import SMALL, coded, launch_cdna_latent
from tests.amd.offline.offline_driver import compiled_by, last_compiled_by

# Kinds of layer whose loops do other work.
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "window": {"window_left": 127}, "cap": {"soft_cap": 50.0}}


def compiled_decode(arch: str, case: Case, tiles: CdnaTiles) -> CompiledKernel:
    tensors = build(case, torch.device("cpu"))
    programs = known_target(arch).compute_units * tiles.programs_per_cu
    cut = DecodeCut.of(tiles, num_kv_heads=case.heads[1], programs=programs, window_left=case.window_left)
    words = cut.partials_words(gqa_ratio=tensors.gqa_ratio, v_head_dim=case.dims[1], tiles=tiles)
    args = tensors.args(garbage(cut.words(tensors.num_seqs), tensors.q.device), torch.empty(words))

    def launch() -> None:
        cdna_launches.launch_cdna_decode(args, arch=arch, scores=tensors.scores, cut=cut, tiles=tiles)

    return next(kernel for kernel in compiled_by(launch, arch) if kernel.name == "_cdna_decode_kernel")


def compiled_extend(arch: str, case: Case) -> CompiledKernel:
    """The kernel of a case on an arch, with an LSE."""
    tensors = build(case, torch.device("cpu"))
    cut = cdna_extend_cut(tensors)
    args = tensors.args(garbage(cut.words(tensors.q.shape[0], tensors.num_seqs), tensors.q.device), None)
    (kernel,) = compiled_by(
        lambda: cdna_launches.launch_cdna_extend(args, arch=arch, scores=tensors.scores, cut=cut), arch
    )
    return kernel


NAME = "_cdna_latent_decode_kernel"
# Elements of a row that are loaded as K, and again as V.
_K, _V = 576, 512


@dataclass(frozen=True, slots=True)
class Latents:
    """A layer over latent pages. is_coded: whether they hold codes"""

    num_heads: int
    is_coded: bool = False
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16


def compiled_latents(arch: str, layer: Latents) -> CompiledKernel:
    """The decode that serves a layer."""
    case = replace(SMALL, spread=False, heads=(layer.num_heads, 1), page_size=layer.page_size, dtype=layer.dtype)
    tensors = build(coded(case, arch) if layer.is_coded else case, torch.device("cpu"))
    return last_compiled_by(lambda: launch_cdna_latent(arch, tensors), arch, [NAME])[NAME]


def latent_traffic(kernel: CompiledKernel, layer: Latents) -> LoopTraffic:
    """The work of its loop. A row counts once, whatever loads it again: that finds it in a cache.

    layer: over codes of 64 heads, two waves load a row as K
    """
    traffic = loop_traffic(parse_assembly(kernel.asm["amdgcn"]))
    assert traffic is not None
    loaded = (2 if layer.is_coded and layer.num_heads > 32 and layer.page_size % 8 == 0 else 1) * _K + _V
    of_rows = traffic.kv_bytes * _K // loaded
    return replace(traffic, kv_bytes=of_rows, in_flight=min(of_rows, traffic.in_flight * _K // loaded))
