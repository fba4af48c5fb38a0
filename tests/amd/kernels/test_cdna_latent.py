"""Decode over latent pages for CDNA on an AMD GPU, against float64. Without a GPU the simulator runs the same cases."""

from __future__ import annotations

import pytest

from rocm_attn.providers.triton_cdna import TRITONS
from rocm_attn.providers.triton_cdna_latent import LIMITS
from tests.amd.kernels.attention_cases import build
from tests.amd.kernels.cdna_cases import assert_decoded
from tests.amd.kernels.cdna_latent_cases import cases_of, launch_cdna_latent
from tests.amd.kernels.test_cdna_decode import GPU, arch_here


@pytest.mark.gpu
@pytest.mark.rocm
@pytest.mark.skipif(not arch_here(), reason=f"it runs on {' or '.join(LIMITS.archs)} with Triton {TRITONS[-1]}")
@pytest.mark.parametrize("name", cases_of(LIMITS.archs[0]))
@pytest.mark.parametrize("compute_units", [3, 40, 304])
def test_it_gives_what_float64_gives(name: str, compute_units: int) -> None:
    tensors = build(cases_of(arch_here())[name], GPU)
    launch_cdna_latent(arch_here(), tensors, compute_units)
    assert_decoded(tensors)
