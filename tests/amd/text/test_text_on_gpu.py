"""Real weights, and each family in small, on a GPU from graphs, against transformers in float32 on the CPU."""

from pathlib import Path

import pytest
import torch

from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel, load_model
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request
from tests.amd.runner.families import FAMILIES, family_model
from tests.amd.runner.hf_models import hf_logits, random_tokens, save
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


LENGTHS = (60, 31, 17)
# |logits - reference| as a share of |reference|, at the median token (see WITHIN): if two experts are nearly equal, a
# router may choose otherwise. On a CPU the torch provider stays below half of these.
BOUNDS = {torch.float32: 1e-5, torch.float16: 0.02, torch.bfloat16: 0.16}
# The share of tokens within the bound: of scores that are nearly equal an indexer may choose others, at most tokens of
# this model in 16 bits.
WITHIN = {"deepseek_v32": 0.25}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_served_logits_stay_near_those_of_float32(
    family: str, dtype: torch.dtype, graphs: bool, tmp_path: Path, device: torch.device
) -> None:
    reference = family_model(family)
    loaded = load_model(save(reference, tmp_path), dtype=dtype, device=device)
    texts = [random_tokens(length) for length in LENGTHS]
    logits, replays = served_logits(
        loaded,
        texts,
        [20] * len(texts),
        chunk=7,
        page_size=16,
        graphs=graphs,
        provider="triton" if device.type == "cuda" else "torch",
    )
    assert (replays > 20) == graphs
    errors = [
        (row - expected[place]).norm() / expected[place].norm()
        for rows, expected in zip(logits, [hf_logits(reference, text) for text in texts], strict=True)
        for place, row in rows.items()
    ]
    assert float(torch.stack(errors).quantile(WITHIN.get(family, 0.5))) < BOUNDS[dtype]
