"""An interrupt at any line of the scheduler loses no sequence and no row: the next call serves all as before."""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Any

import pytest

from rocm_attn.paging.rows import Rows
from rocm_serve import prefix_cache, scheduler
from rocm_serve.request import Request
from rocm_serve.scheduler import NO_SEQUENCE, ScheduledStep, Scheduler
from rocm_serve.speculation.drafts import DraftTree
from tests.amd.runner.interrupts import Lines
from tests.amd.runner.test_scheduler import World, expected_tokens

_FILES = (scheduler.__file__, prefix_cache.__file__)
# Only the table's lines that hand out a row: an interrupt anywhere else there may lose pages.
_ADMIT = Rows.admit.__code__


def _counts(frame: FrameType) -> bool:
    return frame.f_code.co_filename in _FILES or frame.f_code is _ADMIT


def _requests() -> list[Request]:
    """Some requests share a prefix, which is cached by then, and one is long; the last ones have a better priority."""
    shared = tuple(range(12))
    return [
        Request((*shared, 1), 9, priority=1),
        Request((7,) * 20, 14, priority=1),
        Request((*shared, 2, 3), 9, priority=1),
        Request((*shared, 4), 5),
        Request((8,) * 9, 6),
    ]


def _served(lines: Lines, *, drops: bool) -> World:
    """Serves the requests and calls the scheduler again after an interrupt. drops: whether one is dropped right then"""
    world = World(page_size=4, num_pages=1 + 14, max_batch_size=3, chunk=16, max_kv_len=40)
    decide = world.scheduler.next_step

    def next_step(drafts: Mapping[int, DraftTree] = NO_SEQUENCE) -> ScheduledStep | None:
        try:
            with lines.traced():
                step: ScheduledStep | None = decide(drafts)
        except KeyboardInterrupt:
            assert world.scheduler.has_work
            if drops:
                living = [number for number in world.sequences if number not in world.results]
                for number in living[1:]:
                    world.abort(number)
            return decide(drafts)
        return step

    world.scheduler.next_step = next_step  # type: ignore[method-assign]
    for number, request in enumerate(_requests()):
        world.add(number, request)
        for _ in range(4):
            if world.scheduler.has_work:
                world.step()
    while world.scheduler.has_work:
        world.step()
    return world


def _assert_right(world: World, place: tuple[str, int]) -> None:
    for number, request in enumerate(_requests()):
        expected = expected_tokens(request, world.max_kv_len)
        found, reason = world.results[number]
        assert reason == "abort" or (found, reason) == expected, place
        assert found == expected[0][: len(found)], place
    world.scheduler.forget_pages()
    assert world.table.num_free_rows == world.max_batch_size, place
    assert world.table.is_empty, place


@pytest.mark.parametrize("drops", [False, True], ids=["", "and others are dropped"])
@pytest.mark.parametrize("apart", [17, pytest.param(1, marks=pytest.mark.nightly)])
def test_an_interrupt_while_a_step_is_decided_loses_no_sequence_and_no_row(apart: int, drops: bool) -> None:
    """apart: number of chosen lines from one interrupt to the next"""
    lines = Lines(_counts)
    world = _served(lines, drops=False)
    assert world.metrics.preemptions > 0
    assert world.metrics.prefix_hits > 0
    _assert_right(world, ("", 0))
    of_moves = {(scheduler.__file__, line) for code in (Scheduler._admit, Scheduler._end_move) for line in _lines(code)}
    chosen = lines.chosen()
    assert len(chosen) > 100
    for order, number in enumerate(chosen):
        if order % apart == 0 or (not drops and lines.places[number] in of_moves):
            _assert_right(_served(Lines(_counts, (number,)), drops=drops), lines.places[number])


def _lines(function: Any) -> set[int]:
    return {line for _, _, line in function.__code__.co_lines() if line is not None}


def test_an_interrupt_of_a_tables_admit_loses_no_row() -> None:
    table, num_came, has_come = World(4, 15, 3, 16, 40).table, 0, True
    while has_come:
        has_come = False
        try:
            with Lines(_counts, (num_came,)).traced():
                row = table.admit()
        except KeyboardInterrupt:
            num_came, has_come = num_came + 1, True
    assert num_came > 2
    assert table.num_free_rows == 2
    assert {row, table.admit(), table.admit()} == {1, 2, 3}
