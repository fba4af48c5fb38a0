"""Extend for CDNA, compiled."""

from __future__ import annotations

import torch
from triton.compiler import CompiledKernel

from tests.amd.kernels.attention_cases import Case, build, garbage
from tests.amd.kernels.cdna_extend_cases import cdna_extend_cut, launch_cdna_extend
from tests.amd.offline.offline_driver import compiled_by


def compiled_extend(arch: str, case: Case) -> CompiledKernel:
    """The kernel of a case on an arch, with an LSE."""
    tensors = build(case, torch.device("cpu"))
    cut = cdna_extend_cut(tensors)
    args = tensors.args(garbage(cut.words(tensors.q.shape[0], tensors.num_seqs), tensors.q.device), None)
    (kernel,) = compiled_by(lambda: launch_cdna_extend(args, arch=arch, scores=tensors.scores, cut=cut), arch)
    return kernel
