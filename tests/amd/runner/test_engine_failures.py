"""Failures of one request or of the device: they are reported, and no other request loses its work."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import INT32_MAX, StepBatch
from rocm_attn.errors import BadRequest, DeviceFault, WrongState
from rocm_attn.watch.flight_recorder import read_dump
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.recent_steps import RecentSteps
from rocm_serve.request import (
    AbortEvent,
    Completion,
    Event,
    FailureEvent,
    Request,
    RequestsFailed,
    RequestsFaulted,
    TokenEvent,
)
from rocm_serve.sampling.sampling_options import Sampling
from tests.amd.runner.async_engines import is_empty
from tests.amd.runner.serving import BASE as EIGHT
from tests.amd.runner.serving import all_pages_are_free, alone, short_requests, until_done
from tests.amd.runner.test_ngrams import sequence
from tests.amd.runner.tiny_model import NAN_TOKEN

BASE = replace(EIGHT, max_batch_size=4)


# Both ways of sampling, with graphs and without.
@pytest.mark.fast
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=4)])
@pytest.mark.parametrize(
    ("prompt", "why_it_fails"),
    [((3, 4, NAN_TOKEN), "the largest logit .* is nan"), ((3, NAN_TOKEN, 4), r"step \d+: K or V .* was infinite")],
    ids=["logits", "K and V"],
)
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_pages": 17}, {"num_pages": 17, "steps_ahead": 1}],
    ids=["", "few pages", "few pages, a step ahead"],
)
def test_a_request_of_numbers_that_are_none_fails_alone(
    changes: dict[str, Any],
    prompt: tuple[int, ...],
    why_it_fails: str,
    sampling: Sampling,
    graphs: bool,
    poisoned: LoadedModel,
) -> None:
    """The others were in its step, so each is computed again alone; then they continue undisturbed."""
    good = short_requests(sampling=sampling)
    bad = Request(prompt, 6, sampling)
    engine, events = Engine(poisoned, replace(BASE, graphs=graphs, **changes)), list[Event]()
    with pytest.raises(RequestsFailed, match=f"^1 of 4 requests failed; request 1: {why_it_fails}") as why:
        engine.generate([good[0], bad, *good[1:]], events.append)
    first, failed, *others = why.value.completions
    assert failed.finish_reason == "error"
    assert [first, *others] == [alone(poisoned, request) for request in good]
    assert [event.request for event in events if isinstance(event, FailureEvent)] == [1]
    assert not isinstance(why.value, DeviceFault)
    assert all_pages_are_free(engine)


class _Wiped:
    """Runs the steps of an engine; the device's table is wiped before the named steps, counted from 1."""

    def __init__(self, engine: Engine, *steps: int) -> None:
        self._engine, self._steps, self._numbers = engine, steps, count(1)
        self._run = engine._runner.run

    def __call__(self, batch: StepBatch, pad_to: PadTo | None = None) -> Tensor:
        if next(self._numbers) in self._steps:
            self._engine.runtime.gate._publisher.apply_table_changes()
            self._engine.runtime.table.full.entries.zero_()
        return self._run(batch, pad_to)


def wiped(monkeypatch: pytest.MonkeyPatch, engine: Engine, *steps: int) -> Engine:
    monkeypatch.setattr(engine._runner, "run", _Wiped(engine, *steps))
    return engine


@pytest.mark.parametrize("num_steps", [1, 2, *(pytest.param(num, marks=pytest.mark.nightly) for num in (3, 4)), 5])
def test_a_fault_of_any_step_is_reported_however_short_the_run_is(
    num_steps: int, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request((3, 4, 5), num_steps)
    for faulty in range(1, num_steps + 1):
        engine = wiped(monkeypatch, Engine(loaded, BASE), faulty)
        with pytest.raises(DeviceFault, match=f"step {faulty}: a new token had no page of its own") as why:
            engine.generate([request])
        assert isinstance(why.value, RequestsFaulted)
        (completion,) = why.value.completions
        assert completion.finish_reason == "error"
        assert completion.error.startswith(f"step {faulty}: ")
        assert all_pages_are_free(engine)
        assert engine.generate([request])[0] == alone(loaded, request), "and the next one is served"


@pytest.mark.parametrize("faulty", [1, 2, 3])
def test_requests_that_were_not_in_a_faulty_step_come_out_as_they_are_alone(
    faulty: int, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two run, two wait: those that wait are served afterwards."""
    engine = wiped(monkeypatch, Engine(loaded, replace(BASE, max_batch_size=2)), faulty)
    events: list[Event] = []
    with pytest.raises(RequestsFaulted, match=r"^2 of 4 requests failed; request 0: step") as why:
        engine.generate(short_requests(4), events.append)
    assert [completion.finish_reason for completion in why.value.completions] == ["error"] * 2 + ["length"] * 2
    assert list(why.value.completions[2:]) == [alone(loaded, request) for request in short_requests(4)[2:]]
    assert sorted(event.request for event in events if isinstance(event, FailureEvent)) == [0, 1]
    for number in (2, 3):
        of_one = [event for event in events if isinstance(event, TokenEvent) and event.request == number]
        assert tuple(event.token_id for event in of_one) == why.value.completions[number].token_ids
    assert all_pages_are_free(engine)


def test_faults_that_are_reported_together_fail_the_requests_of_each(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 1 and 2 are the last ones, one request was in each, and serving ends."""
    engine = wiped(monkeypatch, Engine(loaded, replace(BASE, max_batch_size=1)), 1, 2)
    with pytest.raises(RequestsFaulted) as why:
        engine.generate([Request((3, 4), 1), Request((5, 6), 1)])
    assert [completion.error.partition(":")[0] for completion in why.value.completions] == ["step 1", "step 2"]
    assert str(RequestsFaulted([], [DeviceFault("page 0 was lost")])) == "0 of 0 requests failed; page 0 was lost"
    assert engine.report().metrics.faults == 2
    assert all_pages_are_free(engine)


def test_a_fault_of_no_step_ends_all_that_have_run_and_none_that_wait(loaded: LoadedModel) -> None:
    engine = Engine(loaded, replace(BASE, max_batch_size=1))
    done, waits = engine.submit(Request((3, 4), 1)), engine.submit(Request((5, 6), 1))
    engine.step()
    engine.runtime.pool.layer(0).k[0] = 1.0
    engine._take_in(DeviceFault("something wrote to page 0"))
    engine.runtime.pool.layer(0).k[0] = 0.0
    until_done(engine)
    assert engine.completion(done).error == "something wrote to page 0"
    assert engine.completion(waits) == alone(loaded, Request((5, 6), 1))


def test_what_lies_in_page_0_is_reported_when_the_last_request_is_done(loaded: LoadedModel) -> None:
    engine = Engine(loaded, BASE)
    engine.runtime.pool.layer(0).k[0] = 1.0
    with pytest.raises(RequestsFaulted, match=r"^3 of 3 requests failed; request 0: .*page 0"):
        engine.generate(short_requests())
    assert all_pages_are_free(engine)


def test_a_fault_that_shows_when_the_last_request_is_done_is_counted_and_leaves_a_flight_record(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "last_steps.json"
    engine = wiped(monkeypatch, Engine(loaded, replace(BASE, flight_record=record)), 2)
    with pytest.raises(RequestsFaulted):
        engine.generate([Request((3, 4), 2)])
    assert read_dump(record).reason.startswith("DeviceFault: step 2: a new token had no page of its own")
    assert engine.report().metrics.faults == 1
    assert "1 device faults" in str(engine.report().metrics)
    assert engine.generate([Request((3, 4), 2)])[0] == alone(loaded, Request((3, 4), 2))
    assert engine.report().metrics.faults == 1


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_aborted_request_comes_to_what_it_has_so_far(steps: int, loaded: LoadedModel) -> None:
    """Aborts one that runs, after `steps` steps, and one that still waits."""
    engine = Engine(loaded, replace(BASE, max_batch_size=2))
    runs, beside, waits, last = (engine.submit(Request((3, 4, n), 6)) for n in range(4))
    events = [event for _ in range(steps) for event in engine.step()]
    for number in (runs, waits, runs):  # a second abort has no effect and does no harm
        engine.abort(number)
    events += until_done(engine)
    assert [event.request for event in events if isinstance(event, AbortEvent)] == [runs, waits]
    expected = [alone(loaded, Request((3, 4, n), 6)) for n in range(4)]
    stopped = replace(expected[0], token_ids=expected[0].token_ids[:steps], finish_reason="abort")
    assert engine.completion(runs) == stopped
    assert engine.completion(waits) == replace(expected[2], token_ids=(), finish_reason="abort")
    assert [engine.completion(number) for number in (beside, last)] == [expected[1], expected[3]]
    assert engine.report().metrics.aborts == 2
    assert all_pages_are_free(engine)


def test_a_callback_may_cancel_any_request(loaded: LoadedModel) -> None:
    """The completions of the others are not lost with it."""
    engine, seen = Engine(loaded, BASE), list[Event]()

    def on_event(event: Event) -> None:
        seen.append(event)
        if sum(each.request == 0 for each in seen) == 3:
            engine.cancel(1)

    first, cancelled, last = engine.generate(short_requests(), on_event)
    requests = short_requests()
    assert (first, last) == (alone(loaded, requests[0]), alone(loaded, requests[2]))
    assert cancelled == Completion(requests[1].prompt_token_ids, (), "", "abort")
    assert is_empty(engine)


def test_a_callback_may_submit_a_request_but_not_generate(loaded: LoadedModel) -> None:
    """A second generate() took the events of the first one's requests."""
    engine, seen, submitted = Engine(loaded, BASE), list[Event](), list[int]()

    def on_event(event: Event) -> None:
        seen.append(event)
        if len(seen) == 1:
            with pytest.raises(WrongState, match=r"generate\(\) of this engine runs, and a second one would take its"):
                engine.generate(short_requests())
            submitted.append(engine.submit(Request((3, 4), 2)))

    requests = short_requests()
    assert engine.generate(requests, on_event) == [alone(loaded, request) for request in requests]
    assert engine.completion(submitted[0]) == alone(loaded, Request((3, 4), 2))
    assert {event.request for event in seen} == {0, 1, 2, 3}
    assert engine.generate(requests) == [alone(loaded, request) for request in requests]


def test_an_abort_of_what_has_ended_changes_nothing_and_one_of_no_request_is_refused(loaded: LoadedModel) -> None:
    engine = Engine(loaded, BASE)
    number = engine.submit(Request((3, 4), 2))
    until_done(engine)
    engine.abort(number)
    assert not engine.has_work
    assert engine.completion(number) == alone(loaded, Request((3, 4), 2))
    engine.abort(number)
    nothing: Any = None
    for unknown in (-1, number + 1, nothing):
        with pytest.raises(
            BadRequest, match=rf"there is no request {unknown}; submit\(\) has returned the numbers below 1"
        ):
            engine.abort(unknown)


@pytest.mark.parametrize("reason", [None, "done", 3, []])
def test_an_abort_for_no_reason_is_refused_and_the_request_goes_on(reason: Any, loaded: LoadedModel) -> None:
    """With None the request was neither served nor ended: it had no completion and no event."""
    request = Request((3, 4), 3)
    engine = Engine(loaded, BASE)
    number = engine.submit(request)
    with pytest.raises(BadRequest, match=r"reason is .*; it must be one of stop, length, error, abort"):
        engine.abort(number, reason)
    until_done(engine)
    assert engine.completion(number) == alone(loaded, request)


def test_the_fault_of_a_step_is_reported_although_an_abort_leaves_no_work(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = wiped(monkeypatch, Engine(loaded, BASE), 1)
    ended, aborted = engine.submit(Request((3, 4), 1)), engine.submit(Request((5, 6), 9))
    engine.step()
    engine.abort(aborted)
    with pytest.raises(DeviceFault, match="step 1"):
        engine.step()
    until_done(engine)
    assert engine.completion(ended).finish_reason == engine.completion(aborted).finish_reason == "error"
    assert all_pages_are_free(engine)


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_a_cancelled_request_leaves_its_pages_and_no_trace(steps: int, loaded: LoadedModel) -> None:
    """One that waits, one that runs, and one that is done."""
    engine = Engine(loaded, replace(BASE, max_batch_size=1))
    gone = engine.submit(Request((3, 4), 3))
    kept = engine.submit(Request((5, 6), 3))
    also_gone = engine.submit(Request((8, 9), 3))
    for _ in range(steps):
        engine.step()
    engine.cancel(gone)
    engine.cancel(also_gone)
    events = until_done(engine)
    assert {event.request for event in events} == {kept}
    assert engine.completion(kept) == alone(loaded, Request((5, 6), 3))
    for number in (gone, also_gone):
        with pytest.raises(BadRequest, match="has no completion: it goes on, was handed over"):
            engine.completion(number)
    assert all_pages_are_free(engine)


def test_faults_of_two_steps_that_are_reported_together_fail_none_that_was_only_beside_them(
    poisoned: LoadedModel,
) -> None:
    """One request fails in step 1 and one in step 2; the others were in both."""
    engine = Engine(poisoned, replace(BASE, max_batch_size=8, chunk=64))
    good = [engine.submit(request) for request in short_requests()]
    bad = []
    for _ in range(2):
        bad.append(engine.submit(Request((3, NAN_TOKEN, 4), 6)))
        engine.step()
    until_done(engine)
    assert [engine.completion(number).finish_reason for number in bad] == ["error"] * 2
    assert [engine.completion(number) for number in good] == [alone(poisoned, request) for request in short_requests()]


def test_a_step_is_found_across_the_wrap_of_its_number() -> None:
    recent = RecentSteps()
    recent.note(INT32_MAX - 2, INT32_MAX - 1, [sequence(1, number=4)])
    recent.note(INT32_MAX - 1, 1, [sequence(1, number=5), sequence(1, number=6)])
    assert recent.requests_in(INT32_MAX - 1, 0) == frozenset({4})
    for step in (INT32_MAX, 0, 1):
        assert recent.requests_in(step, 0) == frozenset({5, 6})
    assert recent.requests_in(2, 0) is recent.requests_in(INT32_MAX - 2, 0) is recent.requests_in(None, 0) is None
