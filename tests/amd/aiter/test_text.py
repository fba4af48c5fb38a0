"""The runner over AITER's kernels: the greedy text of dense attention within float16's rounding, eager and graphed."""

from dataclasses import replace

import pytest
import torch

from rocm_attn.machine.target import Target
from rocm_attn.models.config import AttentionConfig
from rocm_attn.models.geometry import AttentionLayer
from rocm_attn.models.rope import Rope
from rocm_attn.selection import build
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from tests.amd.aiter.serving import GFX942
from tests.amd.aiter.stand_in import StandIn
from tests.amd.runner.dense_attention import assert_greedy
from tests.amd.runner.serving import some_requests
from tests.amd.runner.tiny_model import CONFIG, tiny_model

TORCH = EngineOptions(
    provider="torch", page_size=16, max_batch_size=4, chunk=16, graphs=False, max_kv_len=64, capture_after=0
)


def assert_text(loaded: LoadedModel, engine: Engine) -> None:
    """Checks that each token is the likeliest one, or within a few last places of float16. Logits are up to 8."""
    for done in engine.generate(some_requests(5)):
        assert len(done.token_ids) > 4
        assert_greedy(loaded, done, margin=0.02)


@pytest.fixture
def on_mi300(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes CPU tensors count as those of a gfx942."""

    def detect(device: torch.device) -> Target:
        return GFX942

    monkeypatch.setattr(build, "detect_target", detect)


def wide_model(dtype: torch.dtype) -> LoadedModel:
    """Returns two layers whose eight query heads share one KV head, which kernels over vectorised pages require."""
    attention = AttentionLayer(8, 1, 128, scale=128**-0.5)
    mixer = AttentionConfig(attention, Rope(theta=10000.0, head_dim=128))
    layer = replace(CONFIG.layers[0], mixers=(mixer,))
    return tiny_model(base=replace(CONFIG, layers=(layer, layer)), dtype=dtype)


@pytest.mark.fast(1)
@pytest.mark.usefixtures("on_mi300")
@pytest.mark.parametrize("kernel", ["pa_decode_gluon", "unified_attention"])
def test_over_vectorised_pages_the_text_is_the_same(kernel: str, graphs: bool, aiter: StandIn) -> None:
    loaded = wide_model(torch.float16)
    if kernel == "unified_attention":  # the probe switches the first one off
        aiter.bodies["pa_decode_gluon"] = lambda call: call["output"].zero_()
    options = replace(TORCH, provider="aiter", graphs=graphs, pool="vectorized")
    engine = Engine(loaded, options)
    assert_text(loaded, engine)
    assert_text(loaded, Engine(loaded, replace(TORCH, pool="vectorized")))
    assert engine.report().provider == "aiter"
    assert engine.report().pools == ("vectorised pages",)
    assert any(line.startswith(f"decode: aiter.{kernel}") for line in engine.report().kernels)
    assert {kernel, "flash_attn_varlen_func"} <= set(aiter.calls)
