"""Clients that end their own side of the connection have gone."""

from __future__ import annotations

import socket

from rocm_serve.models.loading import LoadedModel
from tests.amd.runner.async_engines import engine
from tests.amd.server.raw import Client, requested
from tests.amd.server.running import MANY_STEPS, gated_server, running


def test_the_request_of_a_client_that_ends_its_side_is_aborted(loaded: LoadedModel) -> None:
    with gated_server(loaded) as (server, gated), Client(server, requested()) as client:
        gated.wait_until_begun()
        client.socket.shutdown(socket.SHUT_WR)
        server.jobs_are_done()
        gated.let(MANY_STEPS)
        assert server.holds_nothing()
        assert server.between_loops(lambda: server.generations.counts.disconnects) == 1


def test_a_half_of_a_request_is_not_waited_for(loaded: LoadedModel) -> None:
    with running(engine(loaded)) as server, socket.create_connection(server.address) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n")
        client.shutdown(socket.SHUT_WR)
        assert client.recv(4096) == b""
