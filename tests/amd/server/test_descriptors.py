"""The limit of open files: it is raised, it bounds the connections, and a server that reaches it logs one line."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Iterator

import pytest

from rocm_serve.models.loading import LoadedModel
from rocm_serve.server.descriptors import QuietAtTheLimit, connections_within
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


class Exhausted(socket.socket):
    """A listening socket of a process that has as many open files as it may, at its first 50 tries."""

    num_tries = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.num_tries += 1
        if self.num_tries > 50:
            raise BlockingIOError
        raise OSError(errno.EMFILE, "Too many open files")


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def lines() -> Iterator[Lines]:
    """The lines of the server's log."""
    logger, kept = logging.getLogger("uvicorn.error"), Lines()
    logger.addHandler(kept)
    try:
        yield kept
    finally:
        logger.removeHandler(kept)


async def test_connections_that_cannot_be_accepted_are_one_line(monkeypatch: pytest.MonkeyPatch, lines: Lines) -> None:
    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0.0)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(QuietAtTheLimit())
    with Exhausted() as listening:
        listening.bind(("127.0.0.1", 0))
        server = await loop.create_server(asyncio.Protocol, sock=listening, backlog=1)
        with socket.create_connection(listening.getsockname()):
            while listening.num_tries <= 50:
                await asyncio.sleep(0)
        server.close()
    (line,) = lines.records
    assert "no connection can be accepted at present (Too many open files)" in line.getMessage()
    assert line.exc_info is None


def test_a_server_accepts_once_before_it_does_something_else(loaded: LoadedModel) -> None:
    """At the limit, Python's loop goes on for as often as the backlog that it was given; the kernel has its own."""
    with running(engine(loaded)) as server:
        assert server.server.config.backlog == 1
        clients = [socket.create_connection(server.address) for _ in range(50)]
        server.wait_until(lambda: len(server.server.server_state.connections) >= 50)
        for client in clients:
            client.close()


async def test_other_errors_of_the_loop_are_logged_as_before(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    QuietAtTheLimit()(loop, {"message": "a mistake", "exception": ValueError("wrong")})
    QuietAtTheLimit()(loop, {"message": "a pipe", "exception": OSError(errno.EMFILE, "no files")})
    assert [record.getMessage().splitlines()[0] for record in caplog.records] == ["a mistake", "a pipe"]
