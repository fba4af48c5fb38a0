"""A server that was killed can be started again on its port at once, and answers as the first did."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import openai
import pytest

from tests.amd.server.load.clients import Answer, LostAnswer, ask, client_of, conversations, request_all
from tests.amd.server.load.served import Served, served


def test_after_kill_9_the_next_server_has_the_port_at_once_and_the_same_answers(model: Path) -> None:
    requested = conversations(8, seed=31)
    first = Served(model)
    expected = asyncio.run(request_all(first.url, requested, at_a_time=4))

    async def kill_while_it_serves() -> list[object]:
        """Kill it when all streams have begun; what becomes of them."""
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
        return await asyncio.gather(*streams, return_exceptions=True)

    ends = asyncio.run(kill_while_it_serves())
    assert all(isinstance(end, Exception) for end in ends)
    assert first.end() == -signal.SIGKILL
    with served(model, port=first.port) as second:
        assert second.port == first.port
        assert asyncio.run(request_all(second.url, requested, at_a_time=4)) == expected
        counts = second.counts()
        counts.assert_empty()
        assert counts["requests_total"] == len(requested)
    assert second.end() == 0


def test_a_port_that_is_taken_is_named(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AssertionError, match=f"cannot listen on 127.0.0.1 port {port}"):
            Served(model, port=port)


@pytest.mark.nightly
def test_ten_servers_one_after_the_other_on_one_port(model: Path) -> None:
    requested, port = conversations(4, seed=32), 0
    expected: list[Answer] = []
    for turn in range(10):
        server = Served(model, port=port)
        answers = asyncio.run(request_all(server.url, requested, at_a_time=4))
        expected = expected or answers
        assert answers == expected
        port = server.port
        server.send(signal.SIGKILL if turn % 2 else signal.SIGTERM)
        assert server.end() == (-signal.SIGKILL if turn % 2 else 0)


@pytest.mark.nightly
def test_clients_of_a_drained_server_are_reported_to_go_elsewhere(model: Path) -> None:
    server = Served(model)

    async def run() -> object:
        async with client_of(server.url) as client:
            stream = await client.chat.completions.create(**{**conversations(1)[0], "stream": True, "max_tokens": 100})
            server.send(signal.SIGTERM)
            await asyncio.to_thread(server.wait_for, "shutting down")
            refused = None
            try:
                await ask(client, conversations(1)[0])
            except openai.APIError as error:
                refused = error
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].choices[0].finish_reason == "length", "what was taken is served to its end"
            return refused

    refused = asyncio.run(run())
    if isinstance(refused, openai.APIStatusError):
        assert refused.status_code == 503
        assert int(refused.response.headers["retry-after"]) >= 1
    else:
        assert isinstance(refused, openai.APIConnectionError)
    assert server.end() == 0
