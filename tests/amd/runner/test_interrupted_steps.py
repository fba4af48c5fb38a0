"""An interrupt between the reading of a step's tokens and their publication loses none and doubles none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.request import Completion, Event, Request, TokenEvent
from rocm_serve.scheduler import Scheduler
from rocm_serve.speculation.device_steps import DeviceSpeculation, SpeculativePicks
from tests.amd.house.source_tree import ROOT
from tests.amd.runner.interrupts import Counts, Lines, in_functions, within
from tests.amd.runner.round_texts import round_model
from tests.amd.runner.serving import some_requests
from tests.amd.runner.test_device_steps import BASE, KINDS, at_pace, one_by_one
from tests.amd.runner.test_speculation import BASE as TREES
from tests.amd.runner.test_speculation import scripted, without_speculation
from tests.amd.runner.tiny_model import tiny_model
from tests.amd.runner.with_parameters import character_model

# While one of these runs, a step's tokens are no longer only on the device, and not reported yet.
READING = within(str(ROOT / "rocm_serve"), Engine._read_oldest, Engine._publish_read)
# The functions that read rounds together, and those that launch a step.
ROUNDS = in_functions(
    Engine._go_on,
    Engine._read_speculative_steps,
    Engine._append_speculative_steps,
    Engine._publish_speculative_steps,
    Engine._publish_rest,
    DeviceSpeculation.read_together,
    DeviceSpeculation.took,
    SpeculativePicks.read,
    Scheduler.take_together,
)
LAUNCHING = in_functions(Engine._advance, Scheduler.launched)


def served(engine: Engine, requests: list[Request], lines: Lines) -> tuple[list[Completion], list[Event]]:
    """Calls the engine again after each interrupt; returns the requests' completions and events."""
    numbers, events = [engine.submit(request) for request in requests], list[Event]()
    while engine.has_work:
        num_came = lines.num_came
        try:
            with lines.traced():
                new = engine.step()
        except KeyboardInterrupt:
            assert lines.num_came > num_came
        else:
            events += new
    return [engine.completion(number) for number in numbers], events


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return round_model(circle=16)


def world(kind: str, loaded: LoadedModel) -> tuple[Callable[[], Engine], list[Request]]:
    """Returns a factory of engines, and requests that end by length, by a token and, if there is text, by text.

    kind: "plain" or "text", "rounds" or "rounds of text" that are read together, "rounds one by one"
    """
    options = replace(BASE, page_size=4, max_batch_size=3, speculative="off")
    if "text" in kind:
        loaded = replace(loaded, tokenizer=character_model().tokenizer)
    requests = [KINDS["greedy"].request(seed, num) for seed, num in ((1, 6), (6, 9), (2, 9))]
    if "rounds" in kind:
        requests = [replace(request, max_new_tokens=request.max_new_tokens + 38) for request in requests]
    whole = Engine(loaded, replace(options, steps_ahead=0, draft_tokens=4)).generate(requests)
    requests[1] = replace(requests[1], stop_token_ids=(whole[1].token_ids[-5],))
    if kind == "text":
        requests[2] = replace(requests[2], stop=(whole[2].text[3:5],), logprobs=2)
    if "rounds" not in kind:
        return lambda: Engine(loaded, options), requests
    speculating = replace(options, speculative="ngram", draft_tokens=2)

    def of_rounds() -> Engine:
        engine = at_pace(4, Engine(loaded, speculating))
        return one_by_one(engine) if kind == "rounds one by one" else engine

    return of_rounds, requests


def world_of_trees() -> tuple[Callable[[], Engine], list[Request]]:
    """Like `world`, but for a model whose tokens depend on all keys before them, with drafts in other places."""
    options = replace(TREES, speculative="ngram", draft_tokens=16, topk=4, max_batch_size=3)
    loaded, requests = tiny_model(), some_requests(3, 30)
    right = Engine(loaded, without_speculation(options)).generate(requests)
    requests[1] = replace(requests[1], stop_token_ids=(right[1].token_ids[20],))
    return lambda: scripted(loaded, options, right, mistakes=0.0), requests


@pytest.mark.parametrize(
    ("kind", "counts", "apart"),
    [
        ("text", READING, 60),
        ("plain", LAUNCHING, 16),
        ("rounds", ROUNDS, 48),
        *[
            pytest.param(kind, counts, 1, marks=pytest.mark.nightly)
            for kind, counts in (
                *((kind, READING) for kind in ("plain", "text", "trees")),
                *((kind, ROUNDS) for kind in ("rounds", "rounds of text", "rounds one by one")),
                *((kind, LAUNCHING) for kind in ("plain", "rounds")),
            )
        ],
    ],
)
def test_tokens_are_reported_once_wherever_an_interrupt_comes(
    kind: str, counts: Counts, apart: int, loaded: LoadedModel
) -> None:
    """No page is lost either. apart: number of chosen lines from one interrupt to the next"""
    make, requests = world_of_trees() if kind == "trees" else world(kind, loaded)
    lines = Lines(counts)
    wanted, emitted = served(make(), requests, lines)
    assert {done.finish_reason for done in wanted} == {"length", "stop"}
    chosen = lines.chosen()
    assert len(chosen) > (200 if counts is READING else 20)
    for number in chosen[::apart]:
        _check(make(), requests, Lines(counts, (number,)), wanted, emitted, lines.places[number])


def _check(
    engine: Engine,
    requests: list[Request],
    lines: Lines,
    wanted: list[Completion],
    emitted: list[Event],
    place: tuple[str, int],
    num_interrupts: int = 1,
) -> None:
    """Serves requests with interrupts: their texts, events and pages are the same as without."""
    found, events = served(engine, requests, lines)
    assert lines.num_came == num_interrupts, place
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        # Logprobs of a step that is computed in another batch differ in the last bits.
        assert len(one.logprobs) == len(other.logprobs), place
        assert replace(one, logprobs=()) == replace(other, logprobs=()), place
        assert _tokens_of(number, events) == _tokens_of(number, emitted), place
    engine.forget_prefixes()
    assert engine.runtime.table.is_empty, place


def _tokens_of(number: int, events: list[Event]) -> list[tuple[object, ...]]:
    tokens = [event for event in events if isinstance(event, TokenEvent) and event.request == number]
    return [(event.token_id, event.text, event.finish_reason) for event in tokens]


def test_several_interrupts_one_after_another_lose_nothing_either(loaded: LoadedModel) -> None:
    """Each comes where the engine continues after the one before it."""
    make, requests = world("text", loaded)
    lines = Lines(READING)
    wanted, emitted = served(make(), requests, lines)
    for first in range(len(lines.places) // 7, len(lines.places), len(lines.places) // 3):
        at = (first, first + 3, first + 13, first + 14, first + 40)
        _check(make(), requests, Lines(READING, at), wanted, emitted, lines.places[first], len(at))


@pytest.mark.parametrize("leave", [pytest.param(Engine.abort, marks=pytest.mark.nightly), Engine.cancel])
@pytest.mark.parametrize("runs", [pytest.param(False, marks=pytest.mark.nightly, id="waiting"), True])
def test_a_request_that_leaves_does_so_whole_or_not_at_all(
    leave: Callable[[Engine, int], None], runs: bool, loaded: LoadedModel
) -> None:
    """This holds for an interrupt at any line. The others continue undisturbed."""
    make, requests = world("plain", loaded)
    wanted, _ = served(make(), requests, Lines(READING))
    at, came = 0, True
    while came:
        engine, lines = make(), Lines(within(str(ROOT / "rocm_serve"), leave), (at,))
        numbers = [engine.submit(request) for request in requests]
        for _ in range(4 * runs):
            engine.step()
        try:
            with lines.traced():
                leave(engine, numbers[1])
        except KeyboardInterrupt:
            pass
        came = lines.num_came > 0
        while engine.has_work:
            engine.step()
        found = {number: engine.completion(number) for number in numbers if number in engine._done}
        assert [found[0], found[2]] == [wanted[0], wanted[2]], lines.places[-1]
        if 1 in found and found[1].finish_reason != "abort":  # it has not left
            assert found[1] == wanted[1]
        assert not engine._outputs
        engine.forget_prefixes()
        assert engine.runtime.table.is_empty, lines.places[-1]
        at += 3  # of the lines between a row that is freed and its sequence that runs no more
    assert at > 10


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_drafts_of_a_tree_are_moved_once_or_computed_again(after: bool) -> None:
    """An interrupt comes before accepted drafts are moved to their places, or after. after: which of the two"""
    make, requests = world_of_trees()
    wanted = make().generate(requests)
    for which in range(1, 4):
        engine, nums = make(), list[int]()
        numbers = [engine.submit(request) for request in requests]
        move = engine.runtime.move_accepted

        def interrupted(*arguments: Any, which: int = which, nums: list[int] = nums, move: Any = move) -> None:
            nums.append(len(nums) + 1)
            if after or nums[-1] != which:
                move(*arguments)
            if nums[-1] == which:
                raise KeyboardInterrupt

        engine.runtime.move_accepted = interrupted  # type: ignore[method-assign,assignment]
        num_came = 0
        while engine.has_work:
            try:
                engine.step()
            except KeyboardInterrupt:
                num_came += 1
        assert num_came == 1
        assert [engine.completion(number) for number in numbers] == wanted
