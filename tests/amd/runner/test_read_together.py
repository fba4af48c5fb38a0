"""Rounds that are read together: sequences get the same from them as from rounds that are read one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rocm_attn.errors import DeviceFault
from rocm_attn.kernels.metadata.error_word import ERROR_WORD, LENGTH_BEYOND_BOUND
from rocm_serve.engine import Engine
from rocm_serve.engine_thread import EngineThread, StepOutput
from rocm_serve.events import Events, NewTokens, without
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.request import AbortEvent, Completion, Event, Request, TokenEvent
from rocm_serve.speculation.device_steps import SpeculativePicks
from rocm_serve.speculation.reading import AHEAD_SECONDS, FEWEST_AHEAD, MOST_AHEAD, Pace, Together
from tests.amd.runner.round_texts import OPTIONS as ROUNDS
from tests.amd.runner.round_texts import round_model
from tests.amd.runner.test_device_steps import a_request, at_pace, one_by_one, rounds_of
from tests.amd.runner.with_parameters import character_model

# Rounds of 3 tokens in circles of 16: as many of them as there are memories do not end where they began, so that losing
# or swapping some changes the text.
OPTIONS = replace(ROUNDS, draft_tokens=2)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return round_model(circle=16)


def plainly(loaded: LoadedModel, requests: list[Request]) -> list[Completion]:
    return Engine(loaded, replace(OPTIONS, speculative="off", draft_tokens=4, steps_ahead=0)).generate(requests)


def engine_of(loaded: LoadedModel, num_ahead: int = 6, options: EngineOptions = OPTIONS) -> Engine:
    return at_pace(num_ahead, Engine(loaded, options))


def read_by(engine: Engine) -> list[int]:
    """Returns a list that gets the number of rounds each time that some are read together."""
    rounds, nums = rounds_of(engine), list[int]()
    took = rounds.took

    def and_count(together: Together) -> None:
        nums.append(together.num_speculative_steps)
        took(together)

    rounds.took = and_count  # type: ignore[method-assign]
    return nums


def served(engine: Engine, requests: list[Request]) -> tuple[list[Completion], list[list[int]]]:
    """Returns the completions of requests, and the tokens that their events report."""
    emitted: list[list[int]] = [[] for _ in requests]

    def note(event: Any) -> None:
        if isinstance(event, TokenEvent):
            emitted[event.request].append(event.token_id)

    return engine.generate(requests, note), emitted


@pytest.mark.parametrize(
    "num_ahead", [2, pytest.param(4, marks=pytest.mark.nightly), pytest.param(6, marks=pytest.mark.nightly)]
)
def test_the_texts_are_those_of_plain_decoding(num_ahead: int, loaded: LoadedModel) -> None:
    """Some end by a token, others by their length, within rounds and between them."""
    requests = [a_request(seed, 50 + 7 * seed) for seed in range(4)]
    texts = [done.token_ids for done in plainly(loaded, requests)]
    never = [token for token in range(64) if token not in texts[1]]
    requests[1] = replace(requests[1], stop_token_ids=(texts[1][33], *never[:10]))
    requests[2] = replace(requests[2], stop_token_ids=(texts[2][41],))
    engine = engine_of(loaded, num_ahead)
    nums = read_by(engine)
    done, emitted = served(engine, requests)
    assert done == plainly(loaded, requests)
    assert emitted == [list(each.token_ids) for each in done]
    assert max(nums) >= num_ahead // 2


def test_rounds_that_the_device_has_reported_of_are_read_with_those_that_are_waited_for(loaded: LoadedModel) -> None:
    engine = Engine(loaded, OPTIONS)  # on a CPU every launch has finished
    engine._pace.note = lambda seconds, num_speculative_steps: None  # type: ignore[method-assign]
    nums = read_by(engine)
    requests = [a_request(1, 120)]
    assert engine.generate(requests) == plainly(loaded, requests)
    assert max(nums) == FEWEST_AHEAD + 1


def test_what_is_counted_is_what_is_counted_of_rounds_that_are_read_one_by_one() -> None:
    """The texts continue as drafted: otherwise the end of a series depends on when slips are read."""
    loaded, requests = round_model(), [a_request(seed, 60 + seed) for seed in range(3)]
    found = []
    for engine in (engine_of(loaded), one_by_one(engine_of(loaded))):
        engine.generate(requests)
        metrics = engine.report().metrics
        counts = metrics.new_tokens, metrics.verifications, metrics.drafts, metrics.accepted_drafts, metrics.steps
        times = metrics.step_seconds, metrics.host_seconds, metrics.token_gap_seconds, metrics.first_token_seconds
        found.append((counts, [each.count for each in times]))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("num_steps", "has_ended"),
    [
        pytest.param(20, False, marks=pytest.mark.nightly),
        pytest.param(21, False, marks=pytest.mark.nightly),
        (22, True),
        pytest.param(23, True, marks=pytest.mark.nightly),
    ],
)
def test_a_fault_of_a_round_fails_none_that_had_ended_in_a_round_before(
    num_steps: int, has_ended: bool, loaded: LoadedModel
) -> None:
    """All of these rounds have the number of one step, by which the fault is reported.

    has_ended: whether the first request has its last token by then, in a round that was not read
    """
    requests = [a_request(1, 30), a_request(6, 120)]
    wanted = plainly(loaded, requests)
    engine = engine_of(loaded)
    numbers = [engine.submit(request) for request in requests]
    for _ in range(num_steps):
        engine.step()
    series, last = rounds_of(engine)._series, engine.runtime.gate.last
    assert series is not None
    assert last is not None
    pending = [each.picks for each in engine._pending]
    num_tokens = engine._outputs[numbers[0]].num_tokens
    num_tokens += sum(int(picks.emitted[0, 0]) for picks in pending if isinstance(picks, SpeculativePicks))
    assert (num_tokens >= 30) == has_ended
    last.inputs.counts[ERROR_WORD] = LENGTH_BEYOND_BOUND  # as if the round that is launched next had set it
    num_faults = 0
    while engine.has_work:
        try:
            engine.step()
        except DeviceFault:
            num_faults += 1
    done = [engine.completion(number) for number in numbers]
    assert num_faults == 1
    assert done[1].error
    if has_ended:
        assert done[0] == wanted[0]
    else:
        assert done[0].error


@pytest.mark.parametrize(
    "ends_by", [*(pytest.param(way, marks=pytest.mark.nightly) for way in ("length", "abort")), "text"]
)
def test_pages_that_rounds_have_stored_are_found_by_prompts(ends_by: str, loaded: LoadedModel) -> None:
    """All full pages are found, as if each round had been read by itself."""
    with_words = replace(loaded, tokenizer=character_model().tokenizer)
    long = a_request(6, 90)
    (whole,) = plainly(with_words, [long])
    if ends_by == "text":
        long = replace(long, stop=(whole.text[:75],))
    hits = []
    for engine in (engine_of(with_words), one_by_one(engine_of(with_words))):
        number = engine.submit(long)
        while engine.has_work:
            engine.step()
            output = engine._outputs.get(number)
            if ends_by == "abort" and output is not None and output.num_tokens >= 70:
                engine.abort(number)
        done = engine.completion(number)
        assert done.token_ids == whole.token_ids[: len(done.token_ids)]
        again = Request((*long.prompt_token_ids, *whole.token_ids[:60], 3), 2)
        (followed,) = engine.generate([again])
        assert followed == plainly(with_words, [again])[0]
        hits.append(engine.report().metrics.prefix_hits)
    assert hits[0] == hits[1]
    assert hits[0] >= len(long.prompt_token_ids) + 60 - 4


def test_settling_lets_all_pages_be_found_that_rounds_have_stored(loaded: LoadedModel) -> None:
    engine, request = engine_of(loaded, options=replace(OPTIONS, steps_ahead=0)), a_request(1, 120)
    number = engine.submit(request)
    while engine._speculative_to_enter is None or engine._outputs[number].num_tokens < 70:
        engine.step()
    engine.settle()
    sequence = engine._outputs[number].sequence
    assert len(engine._scheduler._cache) == (len(sequence.token_ids) - 1) // engine.runtime.table.page_size


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_no_logits_are_kept_but_those_that_lie_in_the_memory_of_a_graph(graphs: bool, loaded: LoadedModel) -> None:
    engine = engine_of(loaded, options=replace(OPTIONS, graphs=graphs))
    rounds, requests = rounds_of(engine), [a_request(1, 80), a_request(2, 80)]
    launched, kept, run_again = list[Any](), list[Any](), engine._runner.run_again

    def and_note(batch: Any) -> Any:
        launched.append(run_again(batch))
        kept.append(rounds._series.launches.logits)  # type: ignore[union-attr]
        return launched[-1]

    engine._runner.run_again = and_note  # type: ignore[method-assign]
    assert engine.generate(requests) == plainly(loaded, requests)
    assert graphs or len(launched) > len(rounds._memory)
    assert any(each is not None for each in kept) == graphs


def test_the_pace_follows_from_how_long_rounds_take() -> None:
    pace = Pace()
    assert pace.num_ahead == FEWEST_AHEAD
    for seconds, num_speculative_steps, num_ahead in [
        (AHEAD_SECONDS / 4.5, 1, 4),
        (AHEAD_SECONDS * 2 / 3.5, 2, 3),
        (AHEAD_SECONDS / 100, 1, MOST_AHEAD),
        (0.0, 1, MOST_AHEAD),
        (AHEAD_SECONDS * 3, 1, FEWEST_AHEAD),
    ]:
        pace.note(seconds, num_speculative_steps)
        assert pace.num_ahead == num_ahead
        assert 1 <= pace.num_together < pace.num_ahead


def test_events_are_those_that_their_parts_stand_for() -> None:
    end, none = TokenEvent(3, 9, "x", "stop"), Events()
    parts: list[Event | NewTokens] = [NewTokens([1], [[5, 6]]), end, NewTokens([2, 8], [(7,), []]), AbortEvent(4, "")]
    events = Events(parts)
    each: list[Event] = [
        TokenEvent(1, 5, "", None),
        TokenEvent(1, 6, "", None),
        end,
        TokenEvent(2, 7, "", None),
        AbortEvent(4, ""),
    ]
    assert events == each
    assert list(events) == each
    assert [events[place] for place in range(-5, 5)] == [*each, *each]
    assert events[1:3] == each[1:3]
    assert len(events) == 5
    assert (bool(events), bool(none), none == []) == (True, False, True)
    for request in (1, 2, 3, 4):
        assert Events(without(parts, request)) == [event for event in each if event.request != request]
    assert without([NewTokens([1], [[5, 6]])], 1) == []


class _Nothing:
    def completion(self, number: int) -> Completion:
        return Completion((1,), (9,), "x", "stop")


def test_an_engine_thread_takes_tokens_that_came_together_as_it_takes_events() -> None:
    events = Events([NewTokens([1, 8, 2], [[5, 6], [1], []]), TokenEvent(1, 9, "x", "stop"), NewTokens([2], [[7]])])
    for given in (events, list(events)):
        thread = EngineThread(_Nothing())  # type: ignore[arg-type]
        thread._ticket_of, thread._number_of = {1: 10, 2: 20}, {10: 1, 20: 2}
        ended = Completion((1,), (9,), "x", "stop")
        assert thread._output(given) == StepOutput({10: [5, 6, 9], 20: [7]}, {}, {10: ended})
