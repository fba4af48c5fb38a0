"""Memory that long bodies took is given back: rarely, and outside of the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from rocm_serve.server import unused_memory
from rocm_serve.server.unused_memory import UnusedMemory, trim_of_libc
from rocm_serve.text.tokenizer import Tokenizer
from tests.amd.runner.async_engines import engine
from tests.amd.server.raw import post, requested
from tests.amd.server.running import running, word_model

MEBIBYTE = 2**20


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
