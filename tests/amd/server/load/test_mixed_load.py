"""Clients that ask, leave and make errors at once, while the server is drained and replaced."""

from pathlib import Path

import pytest

from tests.amd.server.load.mixed import MOST_GROWTH, MixedLoad


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
