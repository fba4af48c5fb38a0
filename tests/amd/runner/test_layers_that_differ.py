"""A model no two of whose layers are alike: heads, head size, window, scale, rope and MLP are a layer's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_attn.models.config import AttentionConfig, LayerConfig
from rocm_attn.models.gates import ClampedSwiGLU, GeGLU, SwiGLU
from rocm_attn.models.geometry import AttentionLayer
from rocm_attn.models.mlp_config import DenseMlp, ExpertMlp, ExpertTensors
from rocm_attn.models.rope import LinearScaling, Rope
from rocm_attn.models.routing import Routing
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from tests.amd.runner.dense_attention import dense_logits
from tests.amd.runner.serving import some_requests
from tests.amd.runner.tiny_model import CONFIG, tiny_model

_EACH = ExpertMlp(Routing(4, 2, normalised=False), 12, SwiGLU(), ExpertTensors.EACH)
_STACKED = ExpertMlp(Routing(3, 2, normalised=True), 10, ClampedSwiGLU(2.0, 1.5), ExpertTensors.STACKED, has_bias=True)
_WINDOWED = AttentionLayer(4, 2, 8, scale=0.4, window_left=5)
_CAPPED = AttentionLayer(3, 3, 8, scale=0.3, window_left=9, logits_soft_cap=2.0)
LAYERS = tuple(
    LayerConfig((AttentionConfig(attention, rope),), mlp)
    for attention, rope, mlp in (
        (_WINDOWED, Rope(1e4, 8), DenseMlp(40, SwiGLU())),
        (AttentionLayer(2, 1, 16, scale=0.2), Rope(1e6, 16, LinearScaling(4.0)), _EACH),
        (AttentionLayer(6, 3, 4, scale=0.5, has_sinks=True), Rope(1e4, 4), DenseMlp(24, GeGLU(), has_bias=True)),
        (_CAPPED, Rope(5e3, 8), _STACKED),
        (_WINDOWED, Rope(2e4, 8), DenseMlp(16, SwiGLU())),
    )
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model(base=replace(CONFIG, layers=LAYERS))


@pytest.mark.fast(1)
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
def test_layers_that_differ_are_each_served_as_they_are(page_size: int, graphs: bool, loaded: LoadedModel) -> None:
    options = EngineOptions(
        provider="torch", page_size=page_size, max_batch_size=5, chunk=7, graphs=graphs, max_kv_len=64, capture_after=0
    )
    engine, requests = Engine(loaded, options), some_requests()
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        whole = torch.tensor((*request.prompt_token_ids, *completion.token_ids))
        best = dense_logits(loaded, whole).argmax(-1)[len(request.prompt_token_ids) - 1 : -1]
        assert completion.token_ids == tuple(best.tolist())


def test_layers_whose_attention_is_alike_share_a_plan(loaded: LoadedModel) -> None:
    engine = Engine(loaded, EngineOptions(provider="torch", max_kv_len=64))
    kinds = [selection.problem for selection in engine.runtime.selections]
    assert len(kinds) == len(LAYERS) - 1, "the last layer's attention is the first's"
    assert [kind.head_dim for kind in kinds] == [8, 16, 4, 8]
    assert [kind.num_q_heads for kind in kinds] == [4, 2, 6, 3]
