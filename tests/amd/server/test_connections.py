"""Connections: encrypted ones; limits on their number, on open files, and on the time that they may be silent."""

import collections
import http.client
import itertools
import json
import resource
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rocm_attn.errors import BadSetting
from rocm_serve.models.loading import LoadedModel
from rocm_serve.server.descriptors import connections_within
from rocm_serve.server.options import ServerOptions
from tests.amd.runner.async_engines import engine
from tests.amd.runner.tiny_model import tiny_model, word_tokenizer
from tests.amd.server.raw import COMPLETIONS, Client, all_of, post, requested, send
from tests.amd.server.running import MANY_STEPS, Running, gated_server, running

# A self-signed certificate of 127.0.0.1, of no other use.
CERT, KEY = (Path(__file__).parent / "tls" / f"{name}.pem" for name in ("cert", "key"))


def refused(server: Running, reason: str) -> int:
    return server.between_loops(lambda: server.generations.counts.refused[reason])


def test_a_certificate_encrypts_what_is_sent(loaded: LoadedModel) -> None:
    with running(engine(loaded), tls_cert=CERT, tls_key=KEY) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert server.lines[0] == f"listening on {server.url}"
        trusting = ssl.create_default_context(cafile=str(CERT))
        client = http.client.HTTPSConnection(*server.address, context=trusting)
        client.request("POST", "/v1/completions", json.dumps(requested()), {"Content-Type": "application/json"})
        answer = client.getresponse()
        assert (answer.status, json.loads(answer.read())["usage"]["completion_tokens"]) == (200, 4)
        client.close()
        with socket.create_connection(server.address) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n")
            assert b"200" not in all_of(plain)
        assert server.holds_nothing()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tls_key": KEY}, "tls_key is given and tls_cert is not"),
        ({"tls_cert": Path("gone.pem"), "tls_key": KEY}, "tls_cert gone.pem and tls_key .* cannot be used"),
        ({"tls_cert": CERT}, "cannot be used .*; give a certificate and its key, in PEM"),
        ({"tls_cert": KEY, "tls_key": CERT}, "cannot be used"),
    ],
)
def test_files_that_are_no_certificate_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadSetting, match=sentence):
        ServerOptions(**options)


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHost"], ids=["nothing", "half of a head"])
def test_a_connection_that_asks_for_nothing_is_closed(begun: bytes, loaded: LoadedModel) -> None:
    with running(engine(loaded), head_seconds=0.05) as server, socket.create_connection(server.address) as client:
        client.sendall(begun)
        assert all_of(client) == b""
        assert refused(server, "head") == 1


def test_a_second_head_on_a_connection_is_bounded_too(loaded: LoadedModel) -> None:
    with running(engine(loaded)) as server, socket.create_connection(server.address) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        options = server.server._options
        server.between_loops(lambda: object.__setattr__(options, "head_seconds", 0.05))
        client.sendall(b"GET /hea")
        assert b"HTTP" not in all_of(client)
        assert refused(server, "head") == 1


def test_a_request_that_is_served_may_take_longer_than_its_head(loaded: LoadedModel) -> None:
    """No timer runs while it is served, nor while its connection is idle, which has a separate limit."""

    def timers() -> list[bool]:
        return [vars(each)["_head_timer"] is not None for each in server.server.server_state.connections]

    with gated_server(loaded) as (server, gated):
        client = Client(server, requested(stream=True))
        gated.wait_until_begun()
        assert server.between_loops(timers) == [False]
        gated.let(MANY_STEPS)
        client.read_until(b"[DONE]")
        server.jobs_are_done()
        assert server.between_loops(timers) == [False]
        client.leave()


def test_a_connection_too_many_is_closed_and_the_others_are_served(loaded: LoadedModel) -> None:
    with running(engine(loaded), max_connections=2, client_share=1.0) as server:
        first, second = (socket.create_connection(server.address) for _ in range(2))
        with first, second:
            server.wait_until(lambda: len(server.server.server_state.connections) >= 2)
            with socket.create_connection(server.address) as third:
                assert all_of(third) == b""
            assert refused(server, "connections") == 1
            first.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n")
            assert first.recv(4096).startswith(b"HTTP/1.1 200")
        server.wait_until(lambda: not len(server.server.server_state.connections))
        assert post(server, requested()).status == 200
        assert b'rocm_attn_http_refused_total{reason="connections"} 1' in send(server, "GET", "/metrics").body


def test_one_address_has_only_its_share_of_the_connections(loaded: LoadedModel) -> None:
    with running(engine(loaded), max_connections=4) as server:
        first, second = (socket.create_connection(server.address) for _ in range(2))
        with first, second:
            server.wait_until(lambda: len(server.server.server_state.connections) >= 2)
            with socket.create_connection(server.address) as third:
                assert all_of(third) == b""
            with socket.create_connection(server.address, source_address=("127.0.0.2", 0)) as other:
                other.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n")
                assert other.recv(4096).startswith(b"HTTP/1.1 200")
            assert refused(server, "connections") == 1
        server.wait_until(lambda: not len(server.server.server_state.connections))
        assert send(server, "GET", "/health").status == 200


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"y" * 900) for n in range(2000)), 431, ""),
        (b"GET /" + b"y" * 2**20, 431, ""),
        (b"\x16\x03\x01\x02\r\n\r\n" + b"y" * 2**20, 400, "invalid_http"),
        (b"GET /health HTTP/1.1\r\nHost: t\r\nConnection: close\r\nA: " + b"y" * 2**14 + b"\r\n\r\n", 431, ""),
    ],
    ids=["headers", "path", "no HTTP", "whole in one read"],
)
def test_a_client_reads_why_its_head_was_refused_although_it_goes_on_sending(
    head: bytes, status: int, code: str, loaded: LoadedModel
) -> None:
    with running(engine(loaded)) as server, socket.create_connection(server.address) as client:
        client.sendall(head)
        received = all_of(client)
        assert received.startswith(b"HTTP/1.1 %d " % status)
        error = json.loads(received.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == (code or "headers_too_large")
        assert error["message"].count(";") == 1, "it says what to do"
        assert refused(server, "head") == 1


def test_a_body_in_chunks_that_are_none_is_refused_once(loaded: LoadedModel, capfd: pytest.CaptureFixture[str]) -> None:
    """Its request is being answered by then, and a second answer would be an error of the server."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with running(engine(loaded)) as server:
        with socket.create_connection(server.address) as client:
            client.sendall(head + b"-1\r\n")
            assert all_of(client).count(b"HTTP/1.1 400 ") == 1
        assert send(server, "GET", "/health").status == 200
    assert "Traceback" not in capfd.readouterr().err


def test_what_follows_a_request_and_is_none_is_refused_without_its_id(loaded: LoadedModel) -> None:
    with running(engine(loaded)) as server, socket.create_connection(server.address) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\nX-Request-Id: first\r\n\r\nno HTTP\r\n\r\n")
        first, second = all_of(client).split(b"HTTP/1.1 400 ")
        assert b"x-request-id: first" in first
        assert b"invalid_http" in second
        assert b"first" not in second


@pytest.mark.parametrize(
    ("kind", "version", "num_bytes", "status"),
    [("text/plain", "1.1", 1900, 415), ("application/json", "1.0", 9000, 413)],
    ids=["kind", "size"],
)
def test_a_client_reads_why_it_was_refused_although_its_body_still_comes(
    kind: str, version: str, num_bytes: int, status: int, loaded: LoadedModel
) -> None:
    """nginx asks its upstreams to close connections, in HTTP/1.0 unless it is configured otherwise."""
    with running(engine(loaded), max_body_bytes=1000) as server, socket.create_connection(server.address) as client:
        head = f"POST {COMPLETIONS} HTTP/{version}\r\nHost: t\r\nConnection: close\r\n"
        client.sendall(f"{head}Content-Type: {kind}\r\nContent-Length: {num_bytes}\r\n\r\n".encode())
        server.wait_until(lambda: server.generations.counts.refused.total() and not server.generations.counts.open)
        for _ in range(num_bytes // 100):
            client.sendall(b" " * 100)
        assert all_of(client).startswith(b"HTTP/1.1 %d " % status)
        client.close()
        server.wait_until(lambda: not len(server.server.server_state.connections))


def test_a_client_that_never_stops_sending_after_a_refusal_is_cut_off(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocm_serve.server.connections._BYTES_IN_VAIN", 2**20)
    with running(engine(loaded)) as server, socket.create_connection(server.address) as client:
        chunks = itertools.repeat(b"y" * 2**16)
        with pytest.raises(ConnectionError):
            collections.deque(map(client.sendall, chunks), maxlen=0)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model(tokenizer=word_tokenizer())


@pytest.fixture
def limited() -> Iterator[int]:
    """The limit of this process is lower than it may be; it is restored afterwards. Yields the most that it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 600), hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_server_raises_its_limit_as_far_as_it_may(limited: int, loaded: LoadedModel) -> None:
    with running(engine(loaded)) as server:
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limited, limited)
        assert send(server, "GET", "/health").status == 200


def test_connections_are_no_more_than_there_are_descriptors_for() -> None:
    assert connections_within(resource.RLIM_INFINITY, 4096) == 4096
    assert connections_within(100_000, 4096) == 4096
    assert 800 < connections_within(1024, 4096) < 1024 - 64
    assert connections_within(8, 4096) == 1


@pytest.mark.parametrize("limit", [300, 5000])
def test_a_server_announces_that_it_serves_fewer_connections(
    limit: int, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocm_serve.server.run.raise_limit", lambda: limit)
    monkeypatch.setattr("rocm_serve.server.descriptors._num_open", lambda: 36)
    with running(engine(loaded), client_share=1.0, max_connections=4096) as server:
        lines = [line for line in server.lines if "connections" in line]
        assert lines == (
            [
                "at most 200 connections are served, and not 4096 (--max-connections): the process may open 300 files "
                "(ulimit -n)"
            ]
            if limit == 300
            else []
        )
        if limit == 300:
            clients = [socket.create_connection(server.address) for _ in range(201)]
            assert clients[-1].recv(1) == b""
            assert server.between_loops(lambda: server.generations.counts.refused["connections"]) == 1
            for client in clients:
                client.close()


def test_a_server_accepts_once_before_it_does_something_else(loaded: LoadedModel) -> None:
    """At the limit, Python's loop goes on for as often as the backlog that it was given; the kernel has its own."""
    with running(engine(loaded)) as server:
        assert server.server.config.backlog == 1
        clients = [socket.create_connection(server.address) for _ in range(50)]
        server.wait_until(lambda: len(server.server.server_state.connections) >= 50)
        for client in clients:
            client.close()
