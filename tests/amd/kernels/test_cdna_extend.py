"""Extend for CDNA on an AMD GPU, against float64 attention. Without a GPU the simulator runs the same cases."""

from __future__ import annotations

import pytest
import torch

from rocm_attn.machine.target import detect_target
from rocm_attn.providers.triton_cdna import TRITONS
from tests.amd.kernels.attention_cases import build
from tests.amd.kernels.cdna_extend_cases import ARCHS, NAMES, assert_extended, case_of, run_cdna_extend

GPU = torch.device("cuda")


def serves_here() -> bool:
    """True if the kernel serves this machine's GPU."""
    if not torch.cuda.is_available():
        return False
    target = detect_target(GPU)
    return target.arch in ARCHS and target.releases.triton in TRITONS


@pytest.mark.gpu
@pytest.mark.rocm
@pytest.mark.skipif(not serves_here(), reason=f"it runs on {' or '.join(ARCHS)} with Triton {TRITONS[-1]}")
@pytest.mark.parametrize("name", NAMES)
def test_it_gives_what_float64_gives(name: str) -> None:
    arch = detect_target(GPU).arch
    tensors = build(case_of(name, arch), GPU)
    run_cdna_extend(arch, tensors)
    assert_extended(tensors)
