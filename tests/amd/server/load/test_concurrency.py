"""Many requests at once get what each would get alone."""

import pytest

from tests.amd.server.load.clients import conversations, request_all
from tests.amd.server.load.served import Served


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
