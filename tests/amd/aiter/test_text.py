"""The runner over AITER's kernels: the same text as over torch's, eager and graphed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_attn import runtime
from rocm_attn.runner.engine import Engine, EngineOptions
from rocm_attn.runner.geometry import AttentionLayer
from rocm_attn.runner.loading import LoadedModel
from rocm_attn.runner.rope import Rope
from rocm_attn.target import Target
from tests.amd.aiter.serving import GFX942
from tests.amd.aiter.stand_in import StandIn
from tests.amd.runner.test_engine import some_requests, tokens_of
from tests.amd.runner.tiny_model import CONFIG, tiny_model

TORCH = EngineOptions(provider="torch", page_size=16, max_batch_size=4, chunk=16, graphs=False, max_kv_len=64)


def model(head_dim: int, dtype: torch.dtype) -> LoadedModel:
    """Two layers with heads that AITER has kernels for."""
    attention = AttentionLayer(4, 2, head_dim, scale=head_dim**-0.5)
    layer = replace(CONFIG.layers[0], attention=attention, rope=Rope(theta=10000.0, head_dim=head_dim))
    return tiny_model(base=replace(CONFIG, layers=(layer, layer)), dtype=dtype)


@pytest.fixture
def on_mi300(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors count as those of a gfx942."""

    def detect(device: torch.device) -> Target:
        return GFX942

    monkeypatch.setattr(runtime, "detect_target", detect)


@pytest.mark.usefixtures("on_mi300")
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_aiter_generates_the_text_that_torch_generates(head_dim: int, graphs: bool, aiter: StandIn) -> None:
    loaded = model(head_dim, torch.float16)
    options = replace(TORCH, provider="aiter", graphs=graphs)
    engine = Engine(loaded, options)
    generated = tokens_of(engine.generate(some_requests(5)))
    assert generated == tokens_of(Engine(loaded, TORCH).generate(some_requests(5)))
    assert engine.report().provider == "aiter"
    assert {"paged_attention_ragged", "unified_attention", "flash_attn_varlen_func"} <= set(aiter.calls)


@pytest.mark.usefixtures("on_mi300")
def test_the_report_names_aiters_kernels(aiter: StandIn) -> None:
    engine = Engine(model(64, torch.float16), replace(TORCH, provider="aiter"))
    assert "decode: aiter.paged_attention_ragged" in engine.report().kernels
