"""Latent decode for CDNA, compiled."""

from __future__ import annotations

import torch
from triton.compiler import CompiledKernel

from tests.amd.kernels.attention_cases import Case, build
from tests.amd.kernels.cdna_latent_cases import launch_cdna_latent
from tests.amd.offline.offline_driver import last_compiled_by

NAME = "_cdna_latent_decode_kernel"


def compiled_latents(arch: str, case: Case) -> CompiledKernel:
    """The kernel of a case on an arch, with an LSE."""
    tensors = build(case, torch.device("cpu"))
    return last_compiled_by(lambda: launch_cdna_latent(arch, tensors), arch, [NAME])[NAME]
