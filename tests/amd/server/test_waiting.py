"""Bodies that are being read: they take no places, and their bytes are bounded, in total and by client."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from rocm_attn.errors import BadSetting, FitsLater
from rocm_serve.models.loading import LoadedModel
from rocm_serve.server.http_metrics import HttpMetrics
from rocm_serve.server.options import ServerOptions
from rocm_serve.server.waiting import WaitingBytes, client_at
from tests.amd.runner.async_engines import engine
from tests.amd.server.raw import Client, as_bytes, head_of_a_post, post, requested
from tests.amd.server.running import MANY_STEPS, Running, gated_server, running

KEYS = ("first-secret-key", "second-secret-key")
MOST = 30_000


@contextmanager
def slow_bodies(server: Running, sizes: Sequence[int], *headers: str) -> Iterator[list[socket.socket]]:
    """Clients that have sent all but the last byte of bodies of these sizes; the server expects them."""
    before = server.waiting_bytes()
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(server.address)) for _ in sizes]
        for client, size in zip(clients, sizes, strict=True):
            client.sendall(head_of_a_post(f"Content-Length: {size}", *headers) + b" " * (size - 1))
        server.wait_until(lambda: server.generations.counts.waiting_bytes >= before + sum(sizes))
        yield clients


def padded(size: int) -> dict[str, Any]:
    """Returns a request whose body has about this size."""
    return requested(prompt="w1" + " " * size)


def test_bodies_that_never_come_take_no_places(loaded: LoadedModel) -> None:
    with running(engine(loaded), max_requests=2) as server, slow_bodies(server, [1] * 9):
        assert [post(server, requested()).status for _ in range(3)] == [200] * 3


def test_places_are_counted_again_when_a_body_has_come(loaded: LoadedModel) -> None:
    whole = as_bytes(requested())
    with gated_server(loaded, max_requests=1) as (server, gated), ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(server.address)) for _ in range(2)]
        for client in slow:
            client.sendall(whole[:-1])
        server.wait_until(lambda: len(server.jobs) >= 2)
        slow[0].sendall(whole[-1:])
        gated.wait_until_begun()
        slow[1].sendall(whole[-1:])
        assert slow[1].recv(4096).startswith(b"HTTP/1.1 429 ")
        gated.let(MANY_STEPS)
        assert slow[0].recv(4096).startswith(b"HTTP/1.1 200 ")


def test_a_body_too_many_is_answered_429_and_read_when_others_have_gone(loaded: LoadedModel) -> None:
    options: dict[str, Any] = {"max_waiting_bytes": MOST, "max_body_bytes": 20_000, "client_share": 1.0}
    with running(engine(loaded), **options) as server:
        with slow_bodies(server, [14_000, 14_000]) as clients:
            reply = post(server, padded(5000))
            assert (reply.status, reply.error["code"]) == (429, "too_many_requests")
            assert f"bodies of 28000 bytes wait to be served, and this server keeps at most {MOST}" in str(reply.json)
            assert 1 <= int(reply.headers["retry-after"]) <= 60
            assert server.between_loops(lambda: server.generations.counts.refused["queue"]) == 1
            assert post(server, padded(500)).status == 200, "it fits beside the others"
            assert server.waiting_bytes() == 28_000
            clients[0].close()
            server.wait_until(lambda: server.generations.counts.waiting_bytes == 14_000)
            assert post(server, padded(5000)).status == 200
        server.jobs_are_done()
        assert server.waiting_bytes() == 0


def test_one_client_has_only_its_share_of_what_waits(loaded: LoadedModel) -> None:
    options: dict[str, Any] = {"max_waiting_bytes": 2 * MOST, "max_body_bytes": 20_000}
    with running(engine(loaded), keys=KEYS, **options) as server:
        first, second = (f"Bearer {key}" for key in KEYS)
        with slow_bodies(server, [14_000, 14_000], f"Authorization: {first}"):
            reply = post(server, padded(5000), Authorization=first)
            assert (reply.status, reply.error["code"]) == (429, "too_many_requests")
            assert (
                f"28000 bytes of this client's bodies wait to be served, and this server keeps at most {MOST}"
                in str(reply.json)
            )
            assert post(server, padded(5000), Authorization=second).status == 200


def test_a_body_waits_no_longer_when_the_engine_has_its_requests(loaded: LoadedModel) -> None:
    """A long answer to a long prompt keeps nobody else's body out."""
    with gated_server(loaded) as (server, gated), Client(server, {**padded(9000), "stream": True}) as client:
        gated.wait_until_begun()
        server.wait_until(lambda: not server.generations.counts.waiting_bytes)
        assert len(server.jobs) == 1
        gated.let(MANY_STEPS)
        client.read_until(b"[DONE]")


def test_a_body_that_is_too_long_is_counted_no_longer(loaded: LoadedModel) -> None:
    options: dict[str, Any] = {"max_body_bytes": 1000, "max_waiting_bytes": 2000}
    with running(engine(loaded), **options) as server, socket.create_connection(server.address) as client:
        client.sendall(head_of_a_post("Content-Length: 1900") + b" " * 1500)
        server.wait_until(lambda: len(server.jobs))
        server.wait_until(lambda: not server.generations.counts.waiting_bytes)
        client.sendall(b" " * 400)
        assert client.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_what_was_counted_is_forgotten_once() -> None:
    counts = HttpMetrics()
    waiting = WaitingBytes(ServerOptions(max_waiting_bytes=100, max_body_bytes=40), counts)
    first, second = waiting.begin("a", 30), waiting.begin("a", 0)
    first.add(30)
    second.add(20)
    with pytest.raises(FitsLater, match="50 bytes of this client's bodies wait"):
        first.add(1)
    waiting.begin("b", 0).add(50)
    with pytest.raises(FitsLater, match="bodies of 100 bytes wait"):
        waiting.begin("c", 1)
    for _ in range(2):
        first.free()
        assert counts.waiting_bytes == 70
    second.free()
    assert waiting._of == {"b": 50}


def test_a_clients_share_must_hold_a_body() -> None:
    with pytest.raises(BadSetting, match=r"no client could send a body of 51 bytes.*raise max_waiting_bytes"):
        ServerOptions(max_body_bytes=51, max_waiting_bytes=100)
    for share in (0.0, 1.5, -1.0):
        with pytest.raises(BadSetting, match="client_share"):
            ServerOptions(client_share=share)


def test_a_client_has_a_network_of_ipv6_and_one_address_of_ipv4() -> None:
    assert client_at("192.0.2.7") == "192.0.2.7" != client_at("192.0.2.8")
    assert client_at("2001:db8::1") == client_at("2001:db8::ffff:1") != client_at("2001:db8:0:1::1")
    assert client_at("somewhere") == "somewhere"
