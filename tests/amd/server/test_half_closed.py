"""Clients that end their own side of the connection: those that still read get their answer, the others end theirs."""

from __future__ import annotations

import socket

import pytest

from rocm_serve.models.loading import LoadedModel
from tests.amd.runner.async_engines import engine
from tests.amd.server.raw import Client, requested
from tests.amd.server.running import MANY_STEPS, Running, gated_server, running

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


def waits_for_a_reset(server: Running) -> bool:
    """True if the server has seen the end of what its only client sends."""
    (connection,) = server.server.server_state.connections
    return not connection.cycle.keep_alive  # type: ignore[union-attr]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_has_said_all_gets_its_whole_answer(is_stream: bool, loaded: LoadedModel) -> None:
    with gated_server(loaded) as (server, gated), Client(server, requested(stream=is_stream)) as client:
        gated.wait_until_begun()
        client.socket.shutdown(socket.SHUT_WR)
        server.wait_until(lambda: waits_for_a_reset(server))
        gated.let(MANY_STEPS)
        received = client.rest()
        assert received.startswith(INTERIM + b"HTTP/1.1 200 OK\r\n"), "all clients must skip the first (RFC 9110, 15.2)"
        assert (b"data: [DONE]\n\n" if is_stream else b'"completion_tokens":4') in received
        assert server.between_loops(lambda: server.generations.counts.disconnects) == 0


def test_a_client_that_ends_its_side_and_then_goes_is_noticed(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocm_serve.server.half_closed._LOOKS", 1)
    with gated_server(loaded) as (server, gated):
        client = Client(server, requested())
        gated.wait_until_begun()
        client.socket.shutdown(socket.SHUT_WR)
        server.wait_until(lambda: waits_for_a_reset(server))
        assert client.socket.recv(len(INTERIM)) == INTERIM
        client.leave()
        server.jobs_are_done()
        gated.let(MANY_STEPS)
        assert server.holds_nothing()
        assert server.between_loops(lambda: server.generations.counts.disconnects) == 1


def test_a_half_of_a_request_is_not_waited_for(loaded: LoadedModel) -> None:
    with running(engine(loaded)) as server, socket.create_connection(server.address) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n")
        client.shutdown(socket.SHUT_WR)
        assert client.recv(4096) == b""


def test_an_older_client_gets_no_interim_answer(loaded: LoadedModel) -> None:
    with running(engine(loaded)) as server, socket.create_connection(server.address) as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        assert INTERIM not in client.recv(4096)
