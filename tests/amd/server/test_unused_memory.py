"""Memory that long bodies took is given back: rarely, and outside of the event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rocm_serve.server import unused_memory
from rocm_serve.server.unused_memory import UnusedMemory, trim_of_libc
from rocm_serve.text.tokenizer import Tokenizer
from tests.amd.runner.async_engines import engine
from tests.amd.server.raw import head_of_a_post, post, requested
from tests.amd.server.running import Running, running, word_model

MEBIBYTE = 2**20
MOST = 2 * MEBIBYTE


@pytest.fixture
def trims(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads in which memory was given back, which happens as soon as the event loop is free."""
    found: list[str] = []
    monkeypatch.setattr(unused_memory, "SECONDS", 0.0)
    monkeypatch.setattr(unused_memory, "trim_of_libc", lambda: lambda: found.append(threading.current_thread().name))
    return found


def test_memory_is_given_back_once_for_all_long_bodies_until_then(trims: list[str]) -> None:
    async def main() -> None:
        unused = UnusedMemory()
        for length in (0, 1000, MEBIBYTE - 1):
            unused.note(length)
        await asyncio.sleep(0.01)
        assert trims == []
        for num_times in (1, 2):
            for _ in range(9):
                unused.note(MEBIBYTE)
            while len(trims) < num_times:
                await asyncio.sleep(0)

    asyncio.run(main())
    assert len(trims) == 2
    assert threading.current_thread().name not in trims


def too_long(server: Running) -> None:
    assert post(server, b" " * (MOST + MEBIBYTE)).status == 413


def too_many(server: Running) -> None:
    """Another body, which is announced and does not come, leaves this one no room for its end."""
    with socket.create_connection(server.address) as other, socket.create_connection(server.address) as client:
        other.sendall(head_of_a_post(f"Content-Length: {MEBIBYTE // 2}"))
        while server.waiting_bytes() != MEBIBYTE // 2:
            pass
        client.sendall(head_of_a_post("Transfer-Encoding: chunked") + b"%x\r\n%s" % (MOST, b" " * MOST))
        assert client.recv(4096).startswith(b"HTTP/1.1 429 ")


def left(server: Running) -> None:
    with socket.create_connection(server.address) as client:
        client.sendall(head_of_a_post("Transfer-Encoding: chunked") + b"%x\r\n%s" % (MOST, b" " * MEBIBYTE))
        while server.waiting_bytes() != MEBIBYTE:
            pass


@pytest.mark.parametrize("refused", [too_long, too_many, left])
def test_the_memory_of_a_body_that_is_not_served_is_given_back_once(
    refused: Callable[[Running], None], trims: list[str]
) -> None:
    with running(engine(word_model()), max_body_bytes=MOST, max_waiting_bytes=MOST, client_share=1.0) as server:
        refused(server)
        server.jobs_are_done()
    assert len(trims) == 1


def test_a_long_body_is_noted(trims: list[str]) -> None:
    with running(engine(word_model())) as server:
        assert post(server, requested()).status == 200
        assert post(server, requested(prompt="w1" + " " * MEBIBYTE)).status == 200
        while not trims:
            server.between_loops(lambda: None)
    assert len(trims) == 1


def test_it_is_given_back_after_the_text_was_made_tokens_which_takes_most_of_it(
    trims: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, early = Tokenizer.encode, list[str]()
    with running(engine(word_model())) as server:

        def seen(own: Tokenizer, *given: Any) -> list[int]:
            for _ in range(9):
                server.between_loops(lambda: None)
            early.extend(trims)
            return encode(own, *given)

        monkeypatch.setattr(Tokenizer, "encode", seen)
        assert post(server, requested(prompt="w1" + " " * MEBIBYTE)).status == 200
        while not trims:
            server.between_loops(lambda: None)
    assert early == []


def test_what_libc_has_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    trim_of_libc()()
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    trim_of_libc()()
