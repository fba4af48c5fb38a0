"""Real weights on a GPU: narrow dtypes, Triton's kernels and graphs, against transformers in float32 on the CPU."""

from __future__ import annotations

import pytest
import torch

from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel, load_model
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request
from tests.amd.runner.served_logits import served_logits
from tests.amd.text.hf_reference import hf_llama, logits_along
from tests.amd.text.test_text_equality import CHAT_PROMPTS, PLAIN_FACTS, RAW_PROMPTS
from tests.amd.tolerances import LOGITS

pytestmark = pytest.mark.gpu

NEW_TOKENS = 32


@pytest.fixture(scope="module")
def float32() -> LoadedModel:
    return load_model("smollm2", dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", LOGITS, ids=str)
def test_logits_stay_near_those_of_float32(dtype: torch.dtype, float32: LoadedModel, device: torch.device) -> None:
    assert float32.tokenizer is not None
    prompts = [float32.tokenizer.encode_chat(prompt) for prompt in CHAT_PROMPTS]
    prompts += [float32.tokenizer.encode(prompt) for prompt in RAW_PROMPTS]
    loaded = load_model("smollm2", dtype=dtype, device=device)
    engine = Engine(loaded, EngineOptions(provider="triton", max_batch_size=8, max_kv_len=128))
    completions = engine.generate([Request(tuple(prompt), NEW_TOKENS, ignore_eos=True) for prompt in prompts])
    continuations = [completion.token_ids for completion in completions]

    texts = [torch.tensor((*prompt, *new[:-1])) for prompt, new in zip(prompts, continuations, strict=True)]
    rows, num_replays = served_logits(
        loaded, texts, list(map(len, prompts)), chunk=128, page_size=16, graphs=True, provider="triton"
    )
    assert num_replays == NEW_TOKENS - 1
    logits = torch.stack([torch.stack(list(of_text.values())) for of_text in rows])
    model = hf_llama(float32)
    reference = torch.stack([logits_along(model, *pair) for pair in zip(prompts, continuations, strict=True)])
    error = (logits - reference).norm(dim=-1) / reference.norm(dim=-1)
    assert float(error.mean()) < LOGITS[dtype].mean
    assert float(error.max()) < LOGITS[dtype].worst


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_text_makes_sense(dtype: torch.dtype, device: torch.device) -> None:
    loaded = load_model("smollm2", dtype=dtype, device=device)
    assert loaded.tokenizer is not None
    engine = Engine(loaded, EngineOptions(provider="triton", max_batch_size=4, max_kv_len=64))
    requests = [Request(tuple(loaded.tokenizer.encode(prompt)), 6) for prompt, _ in PLAIN_FACTS]
    for completion, (_, word) in zip(engine.generate(requests), PLAIN_FACTS, strict=True):
        assert completion.text.startswith(word)
    report = engine.report()
    assert report.provider == "triton"
    assert report.metrics.replays > 0
