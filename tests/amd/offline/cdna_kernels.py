"""Kernels for CDNA, compiled for an arch, and the work of the loops of latent decode for the rows that they read."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.compiler import CompiledKernel

from rocm_attn.machine.target import known_target
from rocm_lab.cycles.traffic import LoopTraffic, loop_traffic
from rocm_lab.simulator.assembly import parse_assembly
from tests.amd.kernels.attention_cases import Case, build
from tests.amd.kernels.cdna_cases import cdna_cut, launch_cdna, tiles_of_case
from tests.amd.kernels.cdna_extend_cases import run_cdna_extend
from tests.amd.kernels.cdna_latent_cases import SMALL, coded, launch_cdna_latent
from tests.amd.offline.offline_driver import last_compiled_by

CPU = torch.device("cpu")

# Kinds of layer whose loops do other work.
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "window": {"window_left": 127}, "cap": {"soft_cap": 50.0}}


def compiled_decode(arch: str, case: Case) -> CompiledKernel:
    """Decode in the tiles that serve a case, with as many programs as an arch runs."""
    programs = known_target(arch).compute_units * tiles_of_case(arch, case).programs_per_cu
    tensors, cut, name = build(case, CPU), cdna_cut(arch, case, programs), "_cdna_decode_kernel"
    return last_compiled_by(lambda: launch_cdna(arch, tensors, cut), arch, [name])[name]


def compiled_extend(arch: str, case: Case) -> CompiledKernel:
    """Extend in the tiles that serve a case of two sequences, for few tokens: their number changes no code."""
    tensors, name = build(replace(case, q_len=[7, 3]), CPU), "_cdna_extend_kernel"
    return last_compiled_by(lambda: run_cdna_extend(arch, tensors), arch, [name])[name]


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
    tensors = build(coded(case, arch) if layer.is_coded else case, CPU)
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
