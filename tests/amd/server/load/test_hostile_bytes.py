"""Bytes that no client would send are answered with 4xx or not at all, and do not affect other clients."""

import contextlib
import gzip
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.amd.server.load.clients import conversations, request_all
from tests.amd.server.load.served import Served, served
from tests.amd.server.load.wire import CHAT, COMPLETIONS, answers, chat, connection, post, read_all, statuses

# A server's memory may grow by this much while it refuses.
MOST_GROWTH = 64 << 20

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"

# Bodies that are no request, by kind.
BODIES = {
    "nothing": b"",
    "no JSON": b"{",
    "not an object": b"[1]",
    "null": b"null",
    "a number": b"1e999",
    "100,000 brackets": b"[" * 100_000,
    "100,000 objects": b'{"model":' * 100_000,
    "no UTF-8": b'{"model": "\xff\xfe"}',
    "UTF-16": '{"model": "tiny"}'.encode("utf-16"),
    "a NUL": b'\x00{"model": "tiny"}',
    "a number of 100,000 digits": chat().replace(b'"max_tokens": 2', b'"max_tokens": ' + b"9" * 100_000),
    "NaN": chat().replace(b'"max_tokens": 2', b'"temperature": NaN'),
    "Infinity": chat().replace(b'"max_tokens": 2', b'"top_p": Infinity'),
    "half of a pair of surrogates as the model": chat(model="\ud800"),
    "half of a pair as a stop": chat(stop="\udfff"),
    "a key that is no word": chat().replace(b'"model"', b'"\\ud800"'),
    "gzip": gzip.compress(chat()),
}
# Bodies that may be served or refused, but break nothing.
ODD_BODIES = {
    "half of a pair of surrogates": chat(messages=[{"role": "user", "content": "\ud800 w1"}]),
    "half of a pair as a salt": chat(cache_salt="\ud800"),
    "a NUL in the text": chat(messages=[{"role": "user", "content": "w1 \x00 w2"}]),
    "a field twice": chat().replace(b'"max_tokens": 2', b'"max_tokens": 2, "max_tokens": 1'),
    "an unknown field of 100,000 letters": chat(what="x" * 100_000),
    "a bias of NaN": chat().replace(b'"max_tokens": 2', b'"max_tokens": 2, "logit_bias": {"1": NaN}'),
    "a bias of 401 digits": chat(logit_bias={"1": 10**400}),
    "a bias of 1e308": chat(logit_bias={"1": 1e308, "2": -1e308}),
    "an integer as a float": chat(temperature=0),
    "a seed of 2**63 - 1": chat(seed=2**63 - 1),
    "a schema that refers to itself": chat(
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        }
    ),
    "half of a pair in a schema": chat(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "\ud800"}}}
    ),
}
# Whole requests that are no HTTP.
REQUESTS = {
    "random bytes": random.Random(5).randbytes(4096),
    "a TLS greeting": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "10,000 headers": b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(10_000)) + b"\r\n",
    "a header of 4 MiB": b"GET /health HTTP/1.1\r\nX: " + b"y" * (4 << 20) + b"\r\n\r\n",
    "a path of 1 MiB": b"GET /" + b"y" * (1 << 20) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a length that is none": post(CHAT, chat(), "Content-Length: many"),
    "a negative length": post(CHAT, chat(), "Content-Length: -5"),
    "two lengths": post(CHAT, chat(), "Content-Length: 5", "Content-Length: 900"),
    "a length and chunks": post(CHAT, chat(), "Content-Length: 5", "Transfer-Encoding: chunked"),
    "a chunk without a size": post(CHAT, b"zz\r\n" + chat(), "Transfer-Encoding: chunked"),
    "a body that ends early": post(CHAT, chat(), "Content-Length: 90000"),
    "a length of a terabyte": post(CHAT, chat(), f"Content-Length: {1 << 40}"),
    "a method that is none": b"\x00\x01 /health HTTP/1.1\r\n\r\n",
}


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    """A server that never times clients out, however slow the machine is."""
    with served(model, "--write-seconds", "100000", "--body-seconds", "100000") as server:
        yield server


@pytest.fixture(autouse=True)
def others_are_served(server: Served) -> Iterator[None]:
    """After each test the server answers as before, has made no error, and holds nothing."""
    yield
    assert statuses(answers(server.port, post(CHAT, chat()))) == [200]
    server.assert_served_all()
    assert not [line for line in server.log if "Traceback" in line], server.log


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_that_is_no_request_is_answered_400(server: Served, path: str, body: bytes) -> None:
    received = answers(server.port, post(path, body))
    assert statuses(received) == [400], received[:500]
    assert b'"error":' in received


@pytest.mark.parametrize("body", ODD_BODIES.values(), ids=ODD_BODIES)
def test_an_odd_body_is_answered_or_refused(server: Served, body: bytes) -> None:
    received = answers(server.port, post(CHAT, body))
    (status,) = statuses(received)
    assert status in (200, 400), received[:500]


@pytest.mark.parametrize("sent", REQUESTS.values(), ids=REQUESTS)
def test_what_is_no_http_is_refused_or_dropped(server: Served, sent: bytes) -> None:
    before = server.counts()["process_resident_memory_bytes"]
    found = statuses(answers(server.port, sent, ends=True))
    assert all(400 <= status < 500 for status in found), found
    assert server.counts()["process_resident_memory_bytes"] - before < MOST_GROWTH


def test_garbage_after_a_good_request_does_not_take_its_answer(server: Served) -> None:
    found = statuses(answers(server.port, GET + GET + b"\x00garbage\r\n\r\n" + GET, ends=False))
    assert found[:2] == [200, 200]
    assert found[2:] in ([], [400])


def test_pipelined_requests_are_answered_in_their_order(server: Served) -> None:
    sent = b"".join(post(CHAT, chat(n=number)).replace(b"Connection: close\r\n", b"") for number in (1, 2, 3))
    received = answers(server.port, sent + post("/nothing", b""))
    assert statuses(received) == [200, 200, 200, 404]
    assert [part.count(b'"index":') for part in received.split(b"HTTP/1.1 ")[1:]] == [1, 2, 3, 0]


async def test_clients_that_say_half_of_a_request_hold_up_nobody(server: Served) -> None:
    requested = conversations(10, seed=9)
    expected = await request_all(server.url, requested, at_a_time=1)
    before = server.counts()
    with contextlib.ExitStack() as stack:
        halves = [stack.enter_context(connection(server.port)) for _ in range(150)]
        for number, half in enumerate(halves):
            whole = post(CHAT, chat())
            half.sendall(whole[: number * len(whole) // len(halves)])
        assert await request_all(server.url, requested, at_a_time=10) == expected
        during = server.counts()
        assert during["process_resident_memory_bytes"] - before["process_resident_memory_bytes"] < MOST_GROWTH
        for half in halves[::2]:
            half.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset in place of an end
    while server.counts()["process_open_fds"] > before["process_open_fds"] + 10:
        pass  # the server sees them go one by one


async def test_a_client_that_reads_nothing_holds_up_nobody(server: Served) -> None:
    requested = conversations(10, seed=10)
    expected = await request_all(server.url, requested, at_a_time=1)
    body = chat(stream=True, max_tokens=60, n=4, ignore_eos=True)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connection(server.port, receive_buffer=1)) for _ in range(4)]
        for each in silent:
            each.sendall(post(CHAT, body))
        assert await request_all(server.url, requested, at_a_time=10) == expected
        late = [read_all(each) for each in silent[:2]]  # two read in the end, two leave without
    assert all(received.rstrip().endswith(b"data: [DONE]\n\n\r\n0") for received in late)
