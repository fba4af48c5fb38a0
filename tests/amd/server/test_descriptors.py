"""The limit of open files: it is raised, and it bounds the connections."""

import resource
import socket
from collections.abc import Iterator

import pytest

from rocm_serve.models.loading import LoadedModel
from rocm_serve.server.descriptors import connections_within
from tests.amd.runner.async_engines import engine
from tests.amd.runner.tiny_model import tiny_model, word_tokenizer
from tests.amd.server.raw import send
from tests.amd.server.running import running


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
