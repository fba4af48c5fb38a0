"""Requests under one API key change nothing for another: neither its answers, nor its hits in the prefix cache."""

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.amd.server.load.clients import ask, client_of, conversations, in_parallel, request_all
from tests.amd.server.load.served import Served, served
from tests.amd.server.load.wire import CHAT, answers, chat, post, statuses

ALICE, MALLORY = "alice-has-this-key", "mallory-has-that-key"


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"{ALICE}\n{MALLORY}\n")
    with served(model, "--api-key-file", str(keys)) as server:
        yield server


# Fields that Mallory adds to one of Alice's conversations.
POISON: tuple[dict[str, Any], ...] = (
    {"logit_bias": {str(token): -100 for token in range(64)}},
    {"logit_bias": {"1": 1e308, "2": -1e308}},
    {"temperature": 1e-300},
    {"temperature": 2.0, "top_p": 1e-300},
    {"presence_penalty": 2.0, "frequency_penalty": -2.0, "repetition_penalty": 0.01},
    {"max_tokens": 2**31 - 1},
    {"max_completion_tokens": 2**31 - 1},
    {"n": 8, "max_tokens": 30},
    {"stop": [f"w{number}" for number in range(16)]},
    {"logprobs": True, "top_logprobs": 20},
    {"seed": -(2**63)},
    {"cache_salt": hashlib.sha256(ALICE.encode()).hexdigest()},
    {"response_format": {"type": "json_object"}},
)


async def poison(server: Served, requested: list[dict[str, Any]], times: int) -> list[int]:
    """Mallory sends Alice's conversations, poisoned, and leaves every third; returns the statuses of the others."""
    found = []
    async with client_of(server.url, MALLORY) as client:

        async def send(number: int) -> None:
            extra = POISON[number % len(POISON)]
            fields = {**requested[number % len(requested)], "stream": number % 3 == 0}
            try:
                answer = await client.chat.completions.create(**fields, extra_body=extra)
                if number % 3 == 0:
                    await answer.close()  # the request is abandoned
                found.append(200)
            except openai.APIStatusError as error:
                found.append(error.status_code)

        await in_parallel(send, range(times), at_a_time=8)
    return found


async def test_poison_under_one_key_changes_no_answer_under_another(server: Served) -> None:
    requested = conversations(12, seed=21)
    expected = await request_all(server.url, requested, at_a_time=1, key=ALICE)
    poisoning = asyncio.ensure_future(poison(server, requested, 2 * len(POISON)))
    got, poisoned = await request_all(server.url, requested * 3, at_a_time=6, key=ALICE), await poisoning
    assert got == expected * 3
    assert set(poisoned) <= {200, 400}
    assert poisoned.count(200) > len(poisoned) / 4, "most of the poison was refused, and shows nothing"
    server.assert_served_all()


async def test_prompts_of_one_key_are_not_found_by_another(server: Served) -> None:
    prompt = " ".join(f"w{number}" for number in range(60, 10, -1))
    requested = {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 1,
        "temperature": 0.0,
        "stream": False,
    }
    digest = hashlib.sha256(ALICE.encode()).hexdigest()

    async def hits(key: str, **extra: object) -> float:
        """Returns the tokens of the prompt that came from the prefix cache."""
        before = server.counts()["prefix_hits_total"]
        async with client_of(server.url, key) as client:
            await ask(client, {**requested, "extra_body": extra})
        return server.counts()["prefix_hits_total"] - before

    assert await hits(ALICE) == 0
    assert await hits(ALICE) > 40
    for extra in ({}, {"cache_salt": digest}, {"cache_salt": f":{digest}"}):
        assert await hits(MALLORY, **extra) == 0, extra
    assert await hits(MALLORY, cache_salt="") > 40, "she finds her own"
    assert await hits(ALICE) > 40


async def test_without_a_key_nothing_is_reported(server: Served) -> None:
    assert statuses(answers(server.port, post(CHAT, chat()))) == [401]
    for key in (ALICE[:-1], f"{ALICE}s", f"{ALICE},{MALLORY}"):
        with pytest.raises(openai.AuthenticationError):
            await request_all(server.url, conversations(1), at_a_time=1, key=key)
    assert "alice" not in "\n".join(server.log)
    assert ALICE not in server.get("/metrics")
