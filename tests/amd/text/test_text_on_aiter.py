"""Real weights over AITER's kernels, as the strict stand-in has them: greedy text, by float32 without a cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rocm_attn.machine.target import Target, known_target
from rocm_attn.selection import build
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel, load_model
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request
from tests.amd.aiter.signatures import E4048607
from tests.amd.aiter.stand_in import install
from tests.amd.runner.dense_attention import dense_logits

PROMPTS = ("The capital of France is", "def fibonacci(n):\n    ", "Once upon a time, in a village by the sea,")
TORCH = EngineOptions(
    provider="torch", page_size=16, max_batch_size=4, chunk=8, graphs=False, max_kv_len=128, capture_after=0
)


@pytest.mark.parametrize(("graphs", "new_tokens"), [pytest.param(False, 24, marks=pytest.mark.nightly), (True, 6)])
def test_text_on_aiter_is_greedy(
    graphs: bool, new_tokens: int, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is the likeliest one, or as likely within a few of float16's last places: logits are up to 32."""
    half = load_model("smollm2", dtype=torch.float16, device=torch.device("cpu"))
    assert half.tokenizer is not None
    requests = [Request(tuple(half.tokenizer.encode(prompt)), new_tokens) for prompt in PROMPTS]

    def detect(device: torch.device) -> Target:
        return known_target("gfx942")

    monkeypatch.setattr(build, "detect_target", detect)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stand_in = install(E4048607, monkeypatch)
    engine = Engine(half, replace(TORCH, provider="aiter", graphs=graphs))
    completions = engine.generate(requests)
    assert completions[0].text.startswith(" Paris")
    for done in completions:
        assert len(done.token_ids) == new_tokens
        ids = torch.tensor(done.prompt_token_ids + done.token_ids)
        logits = dense_logits(loaded, ids[:-1])[-new_tokens:]
        chosen = logits.gather(1, ids[-new_tokens:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() < 0.1, done.text
    assert set(stand_in.calls) == {"flash_attn_varlen_func", "paged_attention_ragged", "unified_attention"}
