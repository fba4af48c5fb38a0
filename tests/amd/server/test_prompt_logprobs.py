"""Logprobs of prompts over HTTP: the requests of lm-eval's client, and vLLM's form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.amd.runner.async_engines import engine
from tests.amd.runner.hf_models import hf_logits, load, save, small_hf_model
from tests.amd.server.raw import CHAT, post, requested
from tests.amd.server.running import NAME, Running, running

TOLERANCE = 1e-3
CONTEXTS = ((5, 17, 60, 33), (9, 12, 33, 61, 4, 8, 15), (40,))


@pytest.fixture(scope="module")
def model() -> Any:
    return small_hf_model("Llama", vocab_size=64)


@pytest.fixture(scope="module")
def server(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    loaded = load(save(model, tmp_path_factory.mktemp("model")))
    with running(engine(loaded, chunk=6)) as served:
        yield served


def logprobs_of(model: Any, token_ids: tuple[int, ...]) -> torch.Tensor:
    """float64 [tokens - 1, vocab]: the logprobs before each token but the first, by transformers."""
    return hf_logits(model, torch.tensor(token_ids))[:-1].double().log_softmax(-1)


def likelihood(model: Any, context: tuple[int, ...], continuation: tuple[int, ...]) -> tuple[float, bool]:
    """The log-likelihood of a continuation, and whether it is the greedy one, by transformers."""
    rows = logprobs_of(model, context + continuation)[len(context) - 1 :]
    own = rows.gather(1, torch.tensor(continuation)[:, None])[:, 0]
    return float(own.sum()), bool((own == rows.max(1).values).all())


def greedy(model: Any, context: tuple[int, ...], num: int) -> tuple[int, ...]:
    tokens = context
    for _ in range(num):
        tokens += (int(hf_logits(model, torch.tensor(tokens))[-1].argmax()),)
    return tokens[len(context) :]


def as_lm_eval_asks(prompts: list[list[int]], **fields: Any) -> dict[str, Any]:
    """The body that lm-eval's local-completions sends for log-likelihoods."""
    body = {"model": NAME, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    return {**body, "echo": True, **fields}


def as_lm_eval_reads(choice: Any, num_context: int, end: int | None) -> tuple[float, bool]:
    """The log-likelihood of a choice's continuation, and whether it is the greedy one, as lm-eval reads the answer."""
    own, top = (choice["logprobs"][name][num_context:end] for name in ("token_logprobs", "top_logprobs"))
    return sum(own), all(one == max(others.values()) for one, others in zip(own, top, strict=True))


@pytest.mark.parametrize(("max_tokens", "end"), [(1, -1), (0, None)])
def test_log_likelihoods_that_lm_eval_asks_for_are_those_of_transformers(
    max_tokens: int, end: int | None, server: Running, model: Any
) -> None:
    continuations = [greedy(model, CONTEXTS[0], 3), (7, 8, 50), greedy(model, CONTEXTS[2], 20)]
    prompts = [[*context, *more] for context, more in zip(CONTEXTS, continuations, strict=True)]
    reply = post(server, as_lm_eval_asks(prompts, max_tokens=max_tokens))
    assert reply.status == 200
    choices = sorted(reply.json["choices"], key=lambda choice: choice["index"])
    for context, more, choice in zip(CONTEXTS, continuations, choices, strict=True):
        found, is_greedy = as_lm_eval_reads(choice, len(context), end)
        expected, expected_greedy = likelihood(model, context, more)
        assert found == pytest.approx(expected, abs=TOLERANCE)
        assert is_greedy == expected_greedy == (more != (7, 8, 50))
        assert choice["logprobs"]["token_logprobs"][0] is choice["logprobs"]["top_logprobs"][0] is None
        assert len(choice["logprobs"]["tokens"]) == len(context) + len(more) + max_tokens
    assert reply.json["usage"]["completion_tokens"] == 3 * max_tokens


def test_an_echo_alone_is_the_prompt_and_its_logprobs(server: Running) -> None:
    with_one, alone = (
        post(server, requested(echo=True, logprobs=2, max_tokens=num)).json["choices"][0] for num in (1, 0)
    )
    assert (alone["text"], alone["finish_reason"]) == ("w9 w12 w33", "length")
    assert with_one["text"].startswith(alone["text"])
    assert {name: values[:-1] for name, values in with_one["logprobs"].items()} == alone["logprobs"]
    assert post(server, requested(echo=True, max_tokens=0)).json["choices"][0]["logprobs"] is None


def test_prompt_logprobs_have_the_form_of_vllm(server: Running, model: Any) -> None:
    tokens, num = CONTEXTS[1], 2
    answers = (
        post(server, requested(prompt=list(tokens), prompt_logprobs=num)).json["choices"][0],
        post(server, requested(prompt=list(tokens), prompt_logprobs=num, n=2)).json["choices"][1],
        post(
            server,
            {
                "model": NAME,
                "temperature": 0,
                "max_tokens": 2,
                "prompt_logprobs": num,
                "messages": [{"role": "user", "content": " ".join(f"w{token}" for token in tokens)}],
            },
            CHAT,
        ).json,
    )
    for answer, prompt in zip(answers, (tokens, tokens, (63, *tokens)), strict=True):
        first, *others = answer["prompt_logprobs"]
        assert first is None
        for token, known, row in zip(prompt[1:], others, logprobs_of(model, prompt), strict=True):
            ranks = row.sort(descending=True).indices[:num].tolist()
            assert set(known) == {str(each) for each in (token, *ranks)}
            for name, each in known.items():
                assert each["logprob"] == pytest.approx(float(row[int(name)]), abs=TOLERANCE)
                assert each["rank"] == (ranks.index(int(name)) + 1 if int(name) in ranks else None)
                assert each["decoded_token"] == f"w{name}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True, "prompt_logprobs": 0}, "stream"),
        ({"stream": True, "echo": True, "logprobs": 0}, "stream"),
        ({"stream": True, "echo": True, "max_tokens": 0}, "stream"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
    ids=str,
)
def test_what_cannot_be_answered_is_refused(fields: dict[str, Any], param: str, server: Running) -> None:
    reply = post(server, requested(**fields))
    assert (reply.status, reply.error["param"]) == (400, param)
