"""Bodies of many messages, prompts or token ids: refused by their number, before any item is looked at."""

from collections.abc import Iterator
from typing import Any

import pytest

from rocm_serve.server.schema import MOST_MESSAGES
from tests.amd.runner.async_engines import engine
from tests.amd.runner.tiny_model import tiny_model
from tests.amd.server.raw import CHAT, COMPLETIONS, post, requested
from tests.amd.server.running import NAME, Running, running

RESPONSES = "/v1/responses"
SAID = {"role": "user", "content": "w1"}
# An item that no list may have: the error of a body says whether it was looked at.
WRONG = {"role": "king", "content": 5}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(engine(tiny_model()), max_prompt_tokens=20, max_choices=4) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "field"),
    [(CHAT, "messages"), ("/tokenize", "messages"), (RESPONSES, "input")],
    ids=["chat", "text", "new"],
)
def test_too_many_messages_are_refused_before_the_first_is_read(path: str, field: str, server: Running) -> None:
    reply = post(server, {"model": NAME, field: [WRONG] * (MOST_MESSAGES + 1)}, path)
    assert (reply.status, reply.error["param"]) == (400, field)
    assert reply.error["message"] == (
        f"{field} has {MOST_MESSAGES + 1} items and this server reads at most {MOST_MESSAGES}; leave some out, or join "
        "them"
    )
    looked_at = post(server, {"model": NAME, field: [WRONG] * MOST_MESSAGES}, path).error["message"]
    assert f"{field} must be" in looked_at


def test_as_many_messages_as_are_read_reach_the_template(server: Running) -> None:
    assert post(server, {"model": NAME, "messages": [SAID] * MOST_MESSAGES}, "/tokenize").json["tokens"]


@pytest.mark.parametrize(
    ("prompt", "code", "says"),
    [
        ([-1] * 21, "context_length_exceeded", "the prompt has 21 tokens and this server allows at most 20"),
        ([[-1] * 21], "context_length_exceeded", "the prompt has 21 tokens and this server allows at most 20"),
        ([[1], [-1] * 21], "context_length_exceeded", "the prompt has 21 tokens and this server allows at most 20"),
        ([[-1]] * 5, "invalid_value", "5 prompts, n is 1"),
        (["w1", *[5] * 4], "invalid_value", "5 prompts, n is 1"),
    ],
    ids=["ids", "one of ids", "several of ids", "prompts", "texts"],
)
def test_a_prompt_that_is_too_large_is_refused_before_its_first_id_is_read(
    prompt: Any, code: str, says: str, server: Running
) -> None:
    reply = post(server, requested(prompt=prompt), COMPLETIONS)
    assert (reply.status, reply.error["code"]) == (400, code)
    assert says in reply.error["message"]


def test_a_prompt_of_the_largest_size_has_each_of_its_ids_read(server: Running) -> None:
    assert post(server, requested(prompt=[1] * 20), COMPLETIONS).json["usage"]["prompt_tokens"] == 20
    for last in (-1, 2**30, 2**31, 2**70, True, 1.0, "w1"):
        says = f"token {2**30} is not in the model's vocabulary" if last == 2**30 else "prompt must be"
        for prompt in ([1] * 19 + [last], [[1]] * 3 + [[last]]):
            reply = post(server, requested(prompt=prompt), COMPLETIONS)
            assert (reply.status, says in reply.error["message"]) == (400, True), reply.error


def test_more_tokens_than_the_context_holds_are_refused_before_the_first_is_read(server: Running) -> None:
    most = post(server, {"prompt": "w1"}, "/tokenize").json["max_model_len"]
    reply = post(server, {"tokens": [-1] * (most + 1)}, "/detokenize")
    assert (reply.status, reply.error["param"]) == (400, "tokens")
    assert reply.error["message"].startswith(
        f"the body has {most + 1} tokens and this server writes the text of at most {most}"
    )
    assert "tokens.0: Input" in post(server, {"tokens": [-1] * most}, "/detokenize").error["message"]
    assert post(server, {"tokens": [1] * most}, "/detokenize").json == {"prompt": " ".join(["w1"] * most)}
