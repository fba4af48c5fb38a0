"""A server that was killed can be started again on its port at once, and answers as the first did."""

import asyncio
import signal
from pathlib import Path

import pytest

from tests.amd.server.load.clients import LostAnswer, client_of, conversations, request_all
from tests.amd.server.load.served import Served, served


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.nightly)])
async def test_after_kill_9_the_next_server_has_the_port_at_once_and_the_same_answers(ranks: str, model: Path) -> None:
    requested = conversations(8, seed=31)
    first = Served(model, "--tp", ranks)
    expected = await request_all(first.url, requested, at_a_time=4)

    begun = asyncio.Semaphore(0)

    async def stream() -> None:
        async with client_of(first.url) as client:
            answer = await client.chat.completions.create(**{**requested[0], "stream": True, "max_tokens": 100})
            begun.release()
            async for _ in answer:
                pass
            raise LostAnswer("it ended as if it were whole")

    streams = [asyncio.ensure_future(stream()) for _ in range(16)]
    for _ in streams:
        await begun.acquire()
    first.send(signal.SIGKILL)
    ends = await asyncio.gather(*streams, return_exceptions=True)
    assert all(isinstance(end, Exception) for end in ends)
    assert first.end() == -signal.SIGKILL
    with served(model, "--tp", ranks, port=first.port) as second:
        assert second.port == first.port
        assert await request_all(second.url, requested, at_a_time=4) == expected
        counts = second.counts()
        counts.assert_empty()
        assert counts["requests_total"] == len(requested)
    assert second.end() == 0
