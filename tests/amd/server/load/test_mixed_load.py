"""Clients that ask, leave and make errors at once, while the server is drained, replaced or killed."""

import asyncio
import signal
from pathlib import Path

import pytest

from tests.amd.server.load.clients import LostAnswer, client_of, conversations, request_all
from tests.amd.server.load.mixed import MOST_GROWTH, MixedLoad
from tests.amd.server.load.served import Served, served


@pytest.mark.parametrize(
    ("num_requests", "drains"), [(150, 1), pytest.param(6000, 2, marks=pytest.mark.nightly)], ids=["short", "long"]
)
async def test_nothing_accepted_is_lost_while_clients_leave_err_and_servers_are_drained(
    model: Path, num_requests: int, drains: int
) -> None:
    load = MixedLoad(model, at_a_time=24, seed=num_requests)
    async with load.running():
        for drain in range(1, drains + 1):
            await load.until(num_requests * drain // (drains + 1))
            await load.drain()
        await load.until(num_requests)
    tally = load.tally
    tally.assert_right()
    assert tally.kinds["drains"] == drains
    assert tally.kinds["open at a drain"] > 0
    for kind, share in (("answered", 0.6), ("left", 0.03), ("invalid", 0.01)):
        assert tally.kinds[kind] > share * num_requests, tally.kinds
    assert tally.grown < MOST_GROWTH, tally.resident


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


@pytest.mark.parametrize(
    ("num_distinct", "times"), [(10, 20), pytest.param(200, 1, marks=pytest.mark.nightly)], ids=["repeated", "distinct"]
)
async def test_200_chats_at_a_concurrency_of_128_get_what_they_get_one_by_one(
    server: Served, num_distinct: int, times: int
) -> None:
    requested = conversations(num_distinct, seed=num_distinct)
    before = server.counts()
    alone = await request_all(server.url, requested, at_a_time=1)
    assert len({answer.text for answer in alone}) > num_distinct / 2
    together = await request_all(server.url, requested * times, at_a_time=128)
    assert together == alone * times
    after = server.counts()
    after.assert_empty()
    assert after["requests_total"] - before["requests_total"] == num_distinct * (1 + times)
    assert after["requests_ended_total:reason=length"] == after["requests_total"]
    assert after["prefix_hits_total"] > before["prefix_hits_total"]
    assert after["usable_pages"] == before["usable_pages"]
    assert after["steps_total"] - before["steps_total"] < after["new_tokens_total"] - before["new_tokens_total"]
