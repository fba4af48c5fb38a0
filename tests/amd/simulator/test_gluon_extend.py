"""The study of extend in Gluon computes attention: figures of a kernel that does not would mean nothing."""

from __future__ import annotations

import pytest
import torch

from rocm_attn.machine.releases import Release, triton_version
from rocm_attn.providers.triton_cdna import TRITONS
from rocm_lab.simulator.launcher import ARCHS, simulated
from tests.amd.offline.extend_study import geometry_of
from tests.amd.offline.gluon_extend import launch_gluon_extend
from tests.amd.tolerances import assert_attention_close

KV_LEN, HEADS, GQA_RATIO = 96, 2, 2


@pytest.mark.nightly
@pytest.mark.skipif(
    Release.of(triton_version()) not in TRITONS, reason="Gluon changes with each Triton; this is written for 3.9.0"
)
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
def test_it_is_attention(arch: str, lazy: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    geometry = geometry_of(arch, rows=32, lazy=lazy, gqa_ratio=GQA_RATIO)
    tokens = geometry.ROWS // GQA_RATIO
    q = torch.randn(tokens, HEADS * GQA_RATIO, 128, generator=generator).bfloat16()
    k, v = (torch.randn(8, 16, HEADS, 128, generator=generator).bfloat16() for _ in range(2))
    # Scores grow from block to block, by more than the limit below which a maximum stays unchanged.
    line = torch.tensor([5, 1, 7, 2, 3, 6], dtype=torch.int32)
    for place, page in enumerate(line.tolist()):
        k[page] *= 1 + 3 * place
    out = torch.full_like(q, float("nan"))
    with simulated(arch):
        launch_gluon_extend(q, k, v, line, out, kv_len=KV_LEN, geometry=geometry)
    keys, values = (side[line.long()].flatten(0, 1).double().repeat_interleave(GQA_RATIO, 1) for side in (k, v))
    scores = torch.einsum("thd,khd->htk", q.double(), keys) * 128**-0.5
    want = torch.einsum("htk,khd->thd", scores.softmax(-1), values)
    assert_attention_close(out, want, torch.bfloat16)
