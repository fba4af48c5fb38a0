"""The scheduler with a model that costs nothing: its KV is a dict of slots, its next token a hash of what it reads.

So a token that was stored in a wrong page, not stored at all, or stored twice changes everything that comes after.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_attn.paging.request_table import RequestTable
from rocm_attn.runner.request import FinishReason, Request, Sequence
from rocm_attn.runner.sampling import Sampler
from rocm_attn.runner.scheduler import ScheduledStep, Scheduler
from rocm_attn.step.metrics import Metrics

VOCAB = 50


def next_token(token_ids: Many[int]) -> int:
    return zlib.crc32(np.array(token_ids, np.int32).tobytes()) % VOCAB


def expected_tokens(request: Request, max_kv_len: int) -> tuple[list[int], FinishReason]:
    """What a request must come to, computed by itself."""
    token_ids, new = list(request.prompt_token_ids), 0
    while True:
        token_ids.append(next_token(token_ids))
        new += 1
        if token_ids[-1] in request.stop_token_ids:
            return token_ids[-new:], "stop"
        if new == request.max_new_tokens or len(token_ids) > max_kv_len:
            return token_ids[-new:], "length"


@dataclass
class World:
    """A scheduler, its table, and the pool as the fake model sees it."""

    page_size: int
    num_pages: int
    max_batch_size: int
    chunk: int
    max_kv_len: int
    slots: dict[int, int] = field(default_factory=dict)
    steps: list[ScheduledStep] = field(default_factory=list)
    results: dict[int, tuple[list[int], FinishReason]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.table = RequestTable(
            max_num_seqs=self.max_batch_size,
            max_kv_len=self.max_kv_len,
            num_pages=self.num_pages,
            page_size=self.page_size,
            device=torch.device("cpu"),
        )
        self.metrics = Metrics()
        self.scheduler = Scheduler(
            self.table,
            self.metrics,
            max_batch_size=self.max_batch_size,
            chunk=self.chunk,
            max_kv_len=self.max_kv_len,
        )

    def add(self, number: int, request: Request) -> None:
        stops = frozenset(request.stop_token_ids)
        sampler = Sampler(request.sampling)
        self.scheduler.add(Sequence(number, request, stops, sampler, list(request.prompt_token_ids)))

    def step(self) -> None:
        step = self.scheduler.next_step()
        self.table.check_batch(step.batch)
        self.steps.append(step)
        outputs = self._forward(step)
        whole = [sequence.num_stored + q == len(sequence.token_ids) for sequence, q in self._q_len(step)]
        assert whole == [True] * step.num_picks + [False] * (len(whole) - step.num_picks)
        reasons = self.scheduler.finish_step(step, outputs[: step.num_picks])
        for sequence, reason in zip(step.picking, reasons, strict=True):
            if reason is not None:
                self.results[sequence.number] = list(sequence.new_token_ids), reason

    @staticmethod
    def _q_len(step: ScheduledStep) -> Iterator[tuple[Sequence, int]]:
        return zip(step.sequences, step.batch.q_len.tolist(), strict=True)

    def _forward(self, step: ScheduledStep) -> list[int]:
        batch, outputs = step.batch, []
        new = iter(batch.token_ids.tolist())
        for row, kv_len, q_len in zip(batch.rows.tolist(), batch.kv_len.tolist(), batch.q_len.tolist(), strict=True):
            pages = self.table.pages_of(row).tolist()
            slots = [pages[i // self.page_size] * self.page_size + i % self.page_size for i in range(kv_len)]
            self.slots.update((slot, next(new)) for slot in slots[kv_len - q_len :])
            outputs.append(next_token([self.slots[slot] for slot in slots]))
        return outputs


requests = st.builds(
    Request,
    prompt_token_ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24).map(tuple),
    max_new_tokens=st.integers(1, 20),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
)


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 6), requests), min_size=1, max_size=12),
    page_size=st.sampled_from([1, 3, 16]),
    max_batch_size=st.integers(1, 6),
    chunk=st.integers(1, 40),
    spare_pages=st.integers(0, 12),
)
@settings(max_examples=150)
def test_every_request_comes_to_what_it_would_alone(
    arrivals: list[tuple[int, Request]], page_size: int, max_batch_size: int, chunk: int, spare_pages: int
) -> None:
    """Random lengths and arrivals over few pages: nothing is lost, leaked, mixed up or starved."""
    max_kv_len = 40
    num_pages = 1 + -(-max_kv_len // page_size) + spare_pages
    world = World(page_size, num_pages, max_batch_size, chunk, max_kv_len)
    for number, (steps_before, request) in enumerate(arrivals):
        for _ in range(steps_before):
            if world.scheduler.has_work:
                world.step()
        world.add(number, request)
    while world.scheduler.has_work:
        world.step()
        assert len(world.steps) < 10_000
    assert world.results == {i: expected_tokens(request, max_kv_len) for i, (_, request) in enumerate(arrivals)}
    assert world.table.num_free_pages == world.table.num_usable_pages
    assert world.table.num_free_rows == max_batch_size
    for step in world.steps:
        decodes = int((step.batch.q_len == 1).sum())
        assert step.batch.num_seqs <= max_batch_size
        assert step.batch.num_tokens <= max(chunk, decodes + 1)


def request(prompt_len: int, max_new_tokens: int = 5) -> Request:
    return Request(tuple(range(prompt_len)), max_new_tokens)


def world(*, num_pages: int = 65, chunk: int = 8, max_kv_len: int = 64) -> World:
    return World(page_size=4, num_pages=num_pages, max_batch_size=4, chunk=chunk, max_kv_len=max_kv_len)


def test_prompts_are_cut_into_chunks_and_mixed_with_decodes() -> None:
    served = world()
    served.add(0, request(3))
    served.add(1, request(20))
    for _ in range(4):
        served.step()
    assert [step.batch.q_len.tolist() for step in served.steps] == [[3, 5], [1, 7], [1, 7], [1, 1]]
    assert [step.num_picks for step in served.steps] == [1, 1, 1, 2]


def test_decodes_run_even_where_they_exceed_the_chunk_and_a_prompt_still_moves() -> None:
    served = world(chunk=1)
    for number in range(3):
        served.add(number, request(1, max_new_tokens=30))
    for _ in range(3):
        served.step()
    served.add(3, request(3))
    served.step()
    assert served.steps[-1].batch.q_len.tolist() == [1, 1, 1, 1]
    assert served.steps[-1].num_picks == 3


def test_requests_are_admitted_in_the_order_they_came() -> None:
    served = world(num_pages=9, chunk=64, max_kv_len=32)
    served.add(0, request(16))
    served.add(1, request(20))  # does not fit beside the first
    served.add(2, request(1))  # would, but came later
    served.step()
    assert [sequence.number for sequence in served.steps[-1].sequences] == [0]


def test_the_youngest_gives_way_and_goes_on_with_the_same_tokens() -> None:
    roomy, tight = world(chunk=64), world(chunk=64, num_pages=1 + 8, max_kv_len=32)
    for served in (roomy, tight):
        for number in range(3):
            served.add(number, Request((number, 1, 2, 3, 4, 5), 20))
        while served.scheduler.has_work:
            served.step()
    assert roomy.metrics.preemptions == 0
    assert tight.metrics.preemptions > 0
    assert tight.results == roomy.results
    assert next(iter(tight.results)) == 0  # the oldest is never the one to give way


def test_one_that_gave_way_goes_on_before_newcomers() -> None:
    served = world(chunk=64, num_pages=1 + 8, max_kv_len=32)
    for number in range(4):
        served.add(number, Request((number, 1, 2, 3, 4, 5), 20))
    while served.scheduler.has_work:
        served.step()
    assert served.metrics.preemptions > 0
    assert list(served.results) == [0, 1, 2, 3]


def test_a_newcomer_waits_while_those_who_run_would_soon_need_its_pages() -> None:
    served = world(chunk=64, num_pages=1 + 8, max_kv_len=32)
    served.add(0, Request(tuple(range(16)), 9))  # 4 pages now, 6 in the end
    served.add(1, Request(tuple(range(16)), 9))  # the other 4 now
    while served.scheduler.has_work:
        served.step()
    assert served.metrics.preemptions == 0


@pytest.mark.parametrize("prompt_len", range(1, 9))
def test_a_pool_made_for_all_of_them_serves_all_of_them_at_once(prompt_len: int) -> None:
    served = world(chunk=64, num_pages=1 + 4 * 3, max_kv_len=12)
    for number in range(4):
        served.add(number, request(prompt_len, max_new_tokens=13 - prompt_len))
    while served.scheduler.has_work:
        served.step()
    assert {step.batch.num_seqs for step in served.steps} == {4}


def test_a_recomputed_sequence_is_cut_into_chunks_like_a_prompt() -> None:
    served = world(chunk=4, num_pages=1 + 8, max_kv_len=32)
    for number in range(3):
        served.add(number, Request((number, 1, 2, 3, 4, 5), 20))
    while served.scheduler.has_work:
        served.step()
    assert served.metrics.preemptions > 0
    assert max(step.batch.num_tokens for step in served.steps) <= 4


@pytest.mark.parametrize(("prompt_len", "new_tokens"), [(60, 5), (63, 2), (64, 1)])
def test_a_sequence_ends_where_its_kv_is_full(prompt_len: int, new_tokens: int) -> None:
    served = world(chunk=64)
    served.add(0, request(prompt_len, max_new_tokens=50))
    while served.scheduler.has_work:
        served.step()
    tokens, reason = served.results[0]
    assert (len(tokens), reason) == (new_tokens, "length")
