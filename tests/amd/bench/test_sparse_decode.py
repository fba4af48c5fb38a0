"""The benchmark of sparse decode times the kernels that a runtime takes."""

from dataclasses import replace

import pytest

from rocm_attn.machine.releases import Releases
from rocm_attn.machine.target import known_target
from rocm_attn.providers.triton_hopper import TRITONS
from rocm_attn.providers.triton_sparse import HopperSelected, TritonSelected
from rocm_lab.benchmarks import sparse_decode
from rocm_lab.benchmarks.sparse_decode import LATENTS, SPLIT, V32, SparseCase, prepared
from tests.amd.bench.layers import CPU


def test_latents_are_attended_to_by_hoppers_own_kernel_where_it_serves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_decode, "_DEVICE", CPU)
    target = replace(known_target("sm_90"), releases=Releases(triton=TRITONS[0]))
    latents, split = (
        prepared(SparseCase("small", 2, 256, replace(V32, top=64), 8, layer), target) for layer in (LATENTS, SPLIT)
    )
    assert type(latents.selected) is HopperSelected
    assert type(split.selected) is TritonSelected
