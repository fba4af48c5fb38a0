"""Eight-bit K and V on real weights: the perplexity of a text (Lewis Carroll, 1865) stays within one percent.

A runtime serves the text in chunks, with what each token is predicted from in pages.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.problem import KVEncoding, Scales
from rocm_attn.selection.build import build_runtime
from rocm_attn.selection.kv_formats import AS_COMPUTED, KVFormat
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.outputs import PerToken
from rocm_attn.step.step import Part
from rocm_serve.models.loading import LoadedModel, load_model
from rocm_serve.models.model import Model
from tests.amd.one_thread import computing_in_one_thread

# relative to the perplexity with K and V in the dtype in which they are computed
MOST = 0.01

# the second is in every run
ENCODINGS = [KVEncoding.E4M3FN, KVEncoding.E4M3FNUZ]
# fewer tokens differ by chance
SHORT = 224


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with computing_in_one_thread():
        yield


def tokens_of(loaded: LoadedModel) -> Tensor:
    text = (Path(__file__).parent / "alice.txt").read_text()
    assert loaded.tokenizer is not None
    return torch.tensor(loaded.tokenizer.encode(text))


def assert_near(
    loaded: LoadedModel, tokens: Tensor, provider: str, encodings: Sequence[KVEncoding] = ENCODINGS
) -> None:
    """Checks that eight-bit perplexity is near, and not the same: the encoding is in use."""
    exact = perplexity(loaded, tokens, AS_COMPUTED, provider=provider)
    assert 2 < exact < 40, "the model understands the text"
    for encoding in encodings:
        eight_bits = perplexity(loaded, tokens, KVFormat(encoding, Scales.TOKEN), provider=provider)
        assert eight_bits != exact
        assert abs(eight_bits / exact - 1) < MOST, f"{encoding}: {eight_bits} in place of {exact}"


def test_perplexity_with_eight_bit_kv_is_within_a_percent(loaded: LoadedModel) -> None:
    assert_near(loaded, tokens_of(loaded)[:SHORT], "torch", ENCODINGS[1:])


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_perplexity_of_a_whole_chapter_is_within_a_percent(dtype: torch.dtype) -> None:
    loaded = load_model("smollm2", dtype=dtype, device=torch.device("cpu"))
    tokens = tokens_of(loaded)
    assert len(tokens) > 2500
    assert_near(loaded, tokens, "torch")


@pytest.mark.gpu
def test_perplexity_on_a_gpu_is_within_a_percent(device: torch.device) -> None:
    loaded = load_model("smollm2", dtype=torch.bfloat16, device=device)
    assert_near(loaded, tokens_of(loaded), "triton")


CHUNK = 256


def perplexity(loaded: LoadedModel, tokens: Tensor, kv: KVFormat, *, provider: str) -> float:
    """exp of the mean loss of every token but the first, in one sequence. tokens: integer [tokens]"""
    device = loaded.weights.device
    runtime = build_runtime(
        loaded.config.attention.problems(dtype=loaded.weights.dtype, page_size=16, kv=kv),
        RuntimeOptions(num_pages=2 + len(tokens) // 16, max_num_seqs=1, max_kv_len=len(tokens), provider=provider),
        device=device,
    )
    model = Model(loaded.config, loaded.weights, runtime.head_weights, max_kv_len=len(tokens))

    def forward(step: Part) -> PerToken:
        every_token = torch.arange(len(step.token_ids), device=device)
        return PerToken(model.forward(replace(step, last_token_of_seq=every_token)))

    runner = StepRunner(runtime, forward, None)
    row, losses = np.array([runtime.table.admit()], np.int32), []
    for first in range(0, len(tokens) - 1, CHUNK):
        new = tokens[first : min(first + CHUNK, len(tokens) - 1)]
        kv_len = np.array([first + len(new)], np.int32)
        runtime.table.reserve_all(row, kv_len)
        batch = StepBatch(row, kv_len, np.array([len(new)], np.int32), new.numpy().astype(np.int32))
        logits = runner.run(batch).tensor
        of_tokens = logits[: len(new)].float().log_softmax(-1).cpu()
        losses.append(-of_tokens.gather(1, tokens[first + 1 : first + 1 + len(new), None].long()))
    return math.exp(float(torch.cat(losses).double().mean()))
