"""A gateway in front of two servers: one dies, drains, comes back; requests go where their beginning is cached."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from tests.amd.house.source_tree import ROOT
from tests.amd.server.load.model_folder import write_model
from tests.amd.server.load.served import Served, served
from tests.amd.server.scraped import families_of, value_of


@contextmanager
def gateway(*servers: str, policy: str = "cache_aware") -> Iterator[str]:
    """The URL of a gateway that knows all servers; it is stopped afterwards."""
    environment = {
        **os.environ,
        "GATEWAY_PORT": str(_free_port()),
        "METRICS_PORT": str(_free_port()),
        "GATEWAY_POLICY": policy,
        "PYTHON": sys.executable,
    }
    url = f"http://127.0.0.1:{environment['GATEWAY_PORT']}"
    process = subprocess.Popen(
        ["bash", "docker/gateway/run.sh", *servers], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
    )
    try:
        while healthy(url) != len(servers):
            assert process.poll() is None, "the gateway has ended"
            _pause()
        yield url
    finally:
        process.kill()
        process.wait()


def get(url: str) -> str:
    """Returns the body of the answer to a GET. Raises OSError."""
    with urllib.request.urlopen(url) as answer:
        return str(answer.read().decode())


def healthy(url: str) -> int:
    """Returns the number of servers that a gateway sends requests to; 0 if it does not listen."""
    try:
        workers = json.loads(get(f"{url}/workers"))["workers"]
    except (OSError, HTTPException):
        return 0
    return sum(worker["is_healthy"] for worker in workers)


def until_healthy(url: str, num_servers: int) -> None:
    while healthy(url) != num_servers:
        _pause()


def _pause() -> None:
    time.sleep(0.2)  # the processes that start or end need the cores


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Answer:
    """A client's part of an answer.

    text:     the text that has come
    is_whole: true if the answer said that it was over
    """

    text: str
    is_whole: bool


def ask(url: str, prompt: str, max_tokens: int, *, stream: bool = False) -> Answer:
    """Requests a completion. Raises HTTPError if the answer is an error before it begins."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        if not stream:
            return Answer(_text(json.loads(answer.read())), True)
        texts: list[str] = []
        try:
            for line in answer:
                data = line.decode().removeprefix("data: ").strip()
                if data == "[DONE]":
                    return Answer("".join(texts), True)
                if data:
                    texts.append(_text(json.loads(data)))
        except (OSError, HTTPException):  # the connection broke
            pass
        return Answer("".join(texts), False)


def _text(reply: dict[str, Any]) -> str:
    return "".join(choice["text"] for choice in reply.get("choices", ()))


pytestmark = pytest.mark.nightly  # three processes each

MAX_TOKENS = 60
PROMPTS = tuple(f"w{number} w{number * 7 % 64} w{number * 29 % 64}" for number in range(1, 33))
Pair = tuple[Served, Served, str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pair(model: Path) -> Iterator[Pair]:
    """Two servers, and the gateway in front of them."""
    with ExitStack() as stack:
        one, other = (stack.enter_context(served(model)) for _ in range(2))
        yield one, other, stack.enter_context(gateway(one.url, other.url))


def num_running(url: str) -> float:
    """Returns the number of sequences that a server computes."""
    return value_of(families_of(get(f"{url}/metrics")), "rocm_attn_running")


def under_load(pair: Pair, *, streams: tuple[bool, ...], hit: signal.Signals) -> list[Future[Answer]]:
    """Sends requests through the gateway, and meanwhile a signal to the first server, which has some of them."""
    server, _, front = pair
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        requested = [
            pool.submit(ask, front, prompt, MAX_TOKENS, stream=streams[number % len(streams)])
            for number, prompt in enumerate(PROMPTS)
        ]
        while num_running(server.url) < len(PROMPTS) / 4:
            assert not all(each.done() for each in requested), "none of them went to the first server"
        server.send(hit)
    return requested


def expected(url: str) -> list[str]:
    """Returns a server's answers to requests that are sent one by one."""
    return [ask(url, prompt, MAX_TOKENS).text for prompt in PROMPTS]


def test_a_server_that_is_killed_loses_no_request_that_can_be_sent_again(pair: Pair) -> None:
    requested = under_load(pair, streams=(False,), hit=signal.SIGKILL)
    texts = [each.result().text for each in requested]
    assert texts == expected(pair[1].url)
    assert healthy(pair[2]) <= 2  # the gateway lives


def test_a_stream_that_had_begun_on_a_killed_server_breaks_off_and_says_so(pair: Pair) -> None:
    requested = under_load(pair, streams=(True, True, False), hit=signal.SIGKILL)
    broken = 0
    for each, text in zip(requested, expected(pair[1].url), strict=True):
        answer = each.result()
        assert answer.text == text if answer.is_whole else text.startswith(answer.text)
        broken += not answer.is_whole
    assert 0 < broken < len(requested)


def test_a_server_that_drains_ends_what_it_has_and_gets_nothing_more(pair: Pair) -> None:
    draining, other, front = pair
    requested = under_load(pair, streams=(True, False), hit=signal.SIGTERM)
    answers = [each.result() for each in requested]
    assert all(answer.is_whole for answer in answers)
    assert [answer.text for answer in answers] == expected(other.url)
    assert draining.end() == 0
    assert [ask(front, prompt, 4).is_whole for prompt in PROMPTS[:8]] == [True] * 8


def test_a_server_that_comes_back_on_its_port_is_used_again(pair: Pair, model: Path) -> None:
    first, _, front = pair
    first.send(signal.SIGKILL)
    first.end()
    until_healthy(front, 1)
    assert ask(front, PROMPTS[0], 4).is_whole
    with served(model, port=first.port) as again:
        until_healthy(front, 2)
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            requested = [pool.submit(ask, front, prompt, MAX_TOKENS) for prompt in PROMPTS]
        assert all(each.result().is_whole for each in requested)
        assert value_of(families_of(get(f"{again.url}/metrics")), "rocm_attn_requests_total") > 0


def test_without_a_server_an_error_comes_and_no_silence(pair: Pair) -> None:
    for server in pair[:2]:
        server.send(signal.SIGKILL)
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(pair[2], PROMPTS[0], 4)
    with refused.value as error:
        assert error.code in (500, 502, 503)


def hit_share(model: Path, policy: str) -> float:
    """The share of all prompts' tokens that a prefix cache had, with two servers behind a gateway.

    All beginnings of 12 conversations together do not fit the pages of one server, but do fit those of two.
    """
    chance = random.Random(17)
    beginnings, ends = ([random_words(chance, length) for _ in range(count)] for length, count in ((48, 12), (4, 144)))
    prompts = [f"{beginnings[number % 12]} {end}" for number, end in enumerate(ends)]
    chance.shuffle(prompts)
    with ExitStack() as stack:
        flags = ("--num-pages", "112", "--max-batch-size", "4")
        urls = [stack.enter_context(served(model, *flags)).url for _ in range(2)]
        front = stack.enter_context(gateway(*urls, policy=policy))
        with ThreadPoolExecutor(2) as pool:
            assert all(pool.map(lambda prompt: ask(front, prompt, 2).is_whole, prompts))
        metrics = [families_of(get(f"{url}/metrics")) for url in urls]
    hits, lookups = (
        sum(value_of(each, f"rocm_attn_prefix_{name}_total") for each in metrics) for name in ("hits", "lookups")
    )
    return hits / lookups


def random_words(chance: random.Random, number: int) -> str:
    """Returns words of the tiny model, a token each."""
    return " ".join(f"w{chance.randrange(1, 60)}" for _ in range(number))


def test_routing_by_beginnings_finds_more_in_the_caches_than_taking_turns(model: Path) -> None:
    assert hit_share(model, "cache_aware") > 1.25 * hit_share(model, "round_robin")
