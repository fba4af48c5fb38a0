"""The logprobs of a prompt's tokens are those of transformers, however the prompt is taken in."""

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.request import Completion, Request, RequestsFailed
from tests.amd.noted import noted
from tests.amd.runner.hf_models import hf_logits, load, save, small_hf_model
from tests.amd.runner.serving import BASE, engine, served_to_the_end
from tests.amd.runner.tiny_model import NAN_TOKEN, tiny_model, with_nan_token

PROMPTS = tuple(
    tuple((7 * place + 3 * first) % 90 + 3 for place in range(length)) for first, length in enumerate((1, 2, 19, 30))
)
# Logits of small models are sums of float32 products in another order.
TOLERANCE: dict[str, Any] = {"atol": 2e-4, "rtol": 1e-4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LoadedModel]:
    reference = small_hf_model("Llama")
    return reference, load(save(reference, tmp_path_factory.mktemp("model")))


def assert_those_of(reference: Any, done: Completion, num_likeliest: int) -> None:
    # Each token of the prompt but the first has one.
    exact = hf_logits(reference, torch.tensor(done.prompt_token_ids))[:-1].double().log_softmax(-1)
    assert [each.token_id for each in done.prompt_logprobs] == list(done.prompt_token_ids[1:])
    for each, row in zip(done.prompt_logprobs, exact, strict=True):
        ids = torch.tensor([token for token, _ in each.likeliest], dtype=torch.long)
        found = torch.tensor([each.logprob, *(logprob for _, logprob in each.likeliest)])
        torch.testing.assert_close(found.double(), row[torch.cat((torch.tensor([each.token_id]), ids))], **TOLERANCE)
        torch.testing.assert_close(row[ids], row.sort(descending=True).values[:num_likeliest], **TOLERANCE)


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    "options",
    [
        *({"chunk": 1}, {"chunk": 3}, {"chunk": 64}, {"chunk": 5, "steps_ahead": 1}, {"graphs": True, "chunk": 7}),
        *({"speculative": "ngram"}, {"speculative": "ngram", "topk": 2, "chunk": 4}),
    ],
    ids=str,
)
def test_they_are_those_of_transformers_beside_requests_without_them(
    options: dict[str, Any], model: tuple[Any, LoadedModel]
) -> None:
    reference, loaded = model
    served = engine(loaded, **options)
    requests = [Request(prompt, 6, prompt_logprobs=2) for prompt in PROMPTS]
    plain = [replace(each, prompt_logprobs=-1) for each in requests]
    done = served.generate([each for pair in zip(requests, plain, strict=True) for each in pair])
    for with_them, without in zip(done[::2], done[1::2], strict=True):
        assert_those_of(reference, with_them, 2)
        assert without.prompt_logprobs == ()
        assert with_them.token_ids == without.token_ids


def test_they_are_sent_to_another_process_in_a_few_words_for_each_token(model: tuple[Any, LoadedModel]) -> None:
    """A server's event loop reads all of them at once."""
    (done,) = engine(model[1]).generate([Request(PROMPTS[-1], 1, prompt_logprobs=2)])
    logprobs, alone = done.prompt_logprobs, tuple(done.prompt_logprobs)
    sent = pickle.dumps(logprobs)
    assert len(sent) < 4 * (1 + 1 + 2 * 2) * len(logprobs) + 300
    assert pickle.loads(sent) == logprobs == alone
    assert (logprobs[-1], logprobs[1:-1]) == (alone[-1], alone[1:-1])


def test_a_long_prompt_has_few_rows_of_logits_at_a_time(
    model: tuple[Any, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, loaded = model
    served = engine(loaded, chunk=64, max_batch_size=2)
    calls = noted(monkeypatch, served._prompts._model, "logits")
    (done,) = served.generate([Request(PROMPTS[-1], 1, prompt_logprobs=1)])
    assert_those_of(reference, done, 1)
    assert max(len(hidden) for (hidden,) in calls) == 2, "as many as a step picks from, whose memory was measured"


def test_logits_that_are_nan_fail_the_request_alone() -> None:
    served = Engine(with_nan_token(tiny_model()), replace(BASE, chunk=3))
    bad, good = Request((9, NAN_TOKEN, 10, 11), 3, prompt_logprobs=0), Request((9, 8, 10, 11), 3, prompt_logprobs=0)
    with pytest.raises(RequestsFailed) as failed:
        served.generate([bad, good])
    first, second = failed.value.completions
    assert "the logits before token 2 of the prompt hold NaN or infinity" in first.error
    assert (second.error, len(second.prompt_logprobs), len(second.token_ids)) == ("", 3, 3)
    assert not served.has_work


def test_an_aborted_prompt_has_those_of_the_tokens_that_were_taken_in() -> None:
    served = engine(tiny_model(), chunk=4)
    number = served.submit(Request(tuple(range(8, 28)), 3, prompt_logprobs=0))
    served.step()
    served.step()
    served.settle()
    served.abort(number)
    (done,) = served_to_the_end(served, [number])
    assert [each.token_id for each in done.prompt_logprobs] == list(range(9, 17))
