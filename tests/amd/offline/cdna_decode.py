"""Decode for CDNA, compiled for an arch."""

from __future__ import annotations

from typing import Any

import torch
from triton.compiler import CompiledKernel

from rocm_attn.kernels.attention.cuts import DecodeCut
from rocm_attn.kernels.tuning.tiles import CdnaTiles
from rocm_attn.machine.target import known_target
from tests.amd.kernels.attention_cases import Case, build, garbage
from tests.amd.kernels.cdna_cases import launch_cdna_decode
from tests.amd.offline.offline_driver import compiled_by

# Kinds of layer whose loops do other work.
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
