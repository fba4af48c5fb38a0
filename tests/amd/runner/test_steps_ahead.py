"""An engine that launches a step before it reads the tokens of the last one: the same tokens, and nothing is lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadSetting, DeviceFault
from rocm_serve.async_engine import AsyncEngine
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.request import Completion, Event, FailureEvent, Request, RequestsFailed, TokenEvent
from rocm_serve.sampling.sampling import Draw, PickedTokens, TokenPicker
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.speculation.speculation import StepPicks
from tests.amd.runner.asking import BASE as ALIKE
from tests.amd.runner.cache_invariants import check_cache
from tests.amd.runner.tiny_model import CONFIG, NAN_TOKEN, tiny_model, with_nan_token

BASE = replace(ALIKE, max_batch_size=4, max_kv_len=40, steps_ahead=1)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def poisoned() -> LoadedModel:
    """Does the same as `with_nan_token`, but NAN_TOKEN is never the likeliest token."""
    model = with_nan_token(tiny_model())
    model.weights.head[NAN_TOKEN] = 0.0
    return model


def alone(loaded: LoadedModel, request: Request) -> Completion:
    return Engine(loaded, replace(BASE, steps_ahead=0)).generate([request])[0]


def assert_is_empty(engine: Engine) -> None:
    """Checks that the engine is empty, except for cached prefixes, which are forgotten."""
    assert not engine.has_work
    engine.forget_prefixes()
    table = engine.runtime.table
    assert (table.full.num_free_pages, table.num_free_rows) == (table.full.num_usable_pages, BASE.max_batch_size)
    engine.runtime.check_device()


def until_done(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


tokens = st.integers(8, CONFIG.vocab_size - 1)
requests = st.builds(
    Request,
    prompt_token_ids=st.one_of(
        st.lists(tokens, min_size=1, max_size=20).map(tuple), st.integers(1, 20).map(lambda length: (9,) * length)
    ),
    max_new_tokens=st.integers(1, 14),
    sampling=st.builds(
        Sampling, temperature=st.sampled_from([0.0, 0.9]), top_p=st.sampled_from([1.0, 0.8]), seed=st.integers(0, 99)
    ),
    stop_token_ids=st.lists(tokens, max_size=8).map(tuple),
    priority=st.sampled_from([0, 0, -1, 1]),
)


workloads = given(
    arrivals=st.lists(st.tuples(st.integers(0, 4), requests), min_size=1, max_size=8),
    aborts=st.dictionaries(st.integers(1, 20), st.integers(0, 7), max_size=2),
    chunk=st.sampled_from([1, 5, 12, 40]),
    num_pages=st.sampled_from([11, 14, 41]),
    graphs=st.booleans(),
)


@pytest.mark.nightly
@workloads
@settings(max_examples=5)
def test_random_requests_come_to_what_they_do_alone(loaded: LoadedModel, **workload: Any) -> None:
    serve_and_compare(loaded, **workload)


@pytest.mark.nightly
@workloads
@settings(max_examples=200)
def test_many_random_requests_come_to_what_they_do_alone(loaded: LoadedModel, **workload: Any) -> None:
    serve_and_compare(loaded, **workload)


def serve_and_compare(
    loaded: LoadedModel,
    arrivals: list[tuple[int, Request]],
    aborts: dict[int, int],
    chunk: int,
    num_pages: int,
    graphs: bool,
) -> None:
    engine = Engine(loaded, replace(BASE, chunk=chunk, num_pages=num_pages, graphs=graphs))
    due = list(itertools.accumulate(late for late, _ in arrivals))
    events: list[Event] = []
    for now in itertools.count():
        for at, (_, request) in zip(due, arrivals, strict=True):
            if at == now:
                engine.submit(request)
        if aborts.get(now, len(arrivals)) < sum(at <= now for at in due):
            engine.abort(aborts[now])
        if engine.has_work:
            events += engine.step()
            check_cache(engine._scheduler._cache, engine.runtime.table)
        elif now >= due[-1]:
            break
    for number, (_, request) in enumerate(arrivals):
        done, expected = engine.completion(number), alone(loaded, request)
        if done.finish_reason == "abort":
            expected = replace(expected, token_ids=expected.token_ids[: len(done.token_ids)], finish_reason="abort")
        assert done == expected
        of_one = [event for event in events if isinstance(event, TokenEvent) and event.request == number]
        assert tuple(event.token_id for event in of_one) == done.token_ids
    assert_is_empty(engine)


class Order:
    """The order of an engine's calls: "run" and "read"."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.ids: list[list[int]] = []
        run, read = engine._steps.run, PickedTokens.read

        def noted_run(batch: StepBatch, pad_to: PadTo | None = None) -> Tensor:
            self.seen.append("run")
            self.ids.append(batch.token_ids.tolist())
            return run(batch, pad_to)

        def noted_read(picks: PickedTokens) -> Any:
            self.seen.append("read")
            return read(picks)

        monkeypatch.setattr(engine._steps, "run", noted_run)
        monkeypatch.setattr(PickedTokens, "read", noted_read)


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_read(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its token ids are then places among that one's picks; a request that ends by its length runs no extra step."""
    engine = Engine(loaded, BASE)
    order = Order(engine, monkeypatch)
    engine.generate([Request((9, 10), 4), Request((11,), 3)])
    assert order.seen == ["run", "run", "read", "run", "read", "run", "read", "read"]
    assert order.ids == [[9, 10, 11], [-1, -2], [-1, -2], [-1]]


def test_the_token_after_a_stop_token_is_dropped(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step in which it was picked stored the stop token in a place that others get: they do not see it."""
    prompt = tuple(range(20, 27))
    whole = alone(loaded, Request(prompt, 12))
    stop = next(token for at, token in enumerate(whole.token_ids) if at > 2 and token not in whole.token_ids[:at])
    engine = Engine(loaded, BASE)
    order = Order(engine, monkeypatch)
    events: list[Event] = []
    (done,) = engine.generate([Request(prompt, 12, stop_token_ids=(stop,))], events.append)
    assert done.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert done.finish_reason == "stop"
    assert len(events) == len(done.token_ids)
    assert order.seen.count("run") == len(events) + 1
    later = Request((*prompt, *done.token_ids, 3, 4), 5)
    assert engine.generate([later])[0] == alone(loaded, later)
    assert engine.metrics.prefix_hits == len(prompt + done.token_ids) // 4 * 4
    assert_is_empty(engine)


def test_a_suspect_is_computed_again_alone_and_the_others_go_on(poisoned: LoadedModel) -> None:
    good = [Request(tuple(range(10 + number, 14 + 3 * number)), 9) for number in range(3)]
    for prompt in ((3, NAN_TOKEN, 4), (3, 4, NAN_TOKEN)):
        engine, events = Engine(poisoned, replace(BASE, num_pages=18)), list[Event]()
        with pytest.raises(RequestsFailed, match=r"^1 of 4 requests failed; request 1") as why:
            engine.generate([good[0], Request(prompt, 6), *good[1:]], events.append)
        first, failed, *others = why.value.completions
        assert failed.finish_reason == "error"
        assert [first, *others] == [alone(poisoned, request) for request in good]
        assert [event.request for event in events if isinstance(event, FailureEvent)] == [1]
        assert_is_empty(engine)


def test_one_that_has_ended_is_not_failed_by_the_step_that_it_was_in_too_many(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row is wiped on the device in the step after its stop token: it has ended before that."""
    prompt, run = tuple(range(20, 27)), Engine._run
    whole = alone(loaded, Request(prompt, 12))
    stop = next(token for at, token in enumerate(whole.token_ids) if at > 2 and token not in whole.token_ids[:at])
    last = whole.token_ids.index(stop) + 1
    engine, numbers = Engine(loaded, BASE), itertools.count(1)

    def wiping(engine: Engine, step: Any) -> StepPicks:
        if next(numbers) == last + 1:
            engine.runtime.gate._publisher.apply_table_changes()
            engine.runtime.table.full.entries.zero_()
        return run(engine, step)

    monkeypatch.setattr(Engine, "_run", wiping)
    number = engine.submit(Request(prompt, 12, stop_token_ids=(stop,)))
    with pytest.raises(DeviceFault, match=f"step {last + 1}: a new token had no page"):
        until_done(engine)
    done = engine.completion(number)
    assert (done.token_ids, done.finish_reason) == (whole.token_ids[:last], "stop")


def test_what_a_step_has_brought_is_there_after_settle(loaded: LoadedModel) -> None:
    engine = Engine(loaded, BASE)
    number = engine.submit(Request((9, 10, 11), 5))
    assert engine.step() == []
    engine.settle()
    (first,) = engine.step()
    assert isinstance(first, TokenEvent)
    until_done(engine)
    assert engine.completion(number) == alone(loaded, Request((9, 10, 11), 5))


def test_weights_that_change_between_two_steps_are_seen_by_no_cached_prefix(loaded: LoadedModel) -> None:
    """forget_prefixes() reads the step that runs: its pages are not entered afterwards."""
    engine = Engine(tiny_model(), BASE)
    request = Request(tuple(range(8, 29)), 3)
    engine.submit(request)
    engine.step()
    engine.forget_prefixes()
    assert engine.report().metrics.cached_pages == len(engine._scheduler._cache) == 0
    until_done(engine)


def test_an_abort_and_a_cancel_of_what_runs_leave_nothing(loaded: LoadedModel) -> None:
    engine = Engine(loaded, BASE)
    numbers = [engine.submit(Request((9, 10 + n), 20)) for n in range(3)]
    for _ in range(4):
        engine.step()
    engine.abort(numbers[0])
    engine.cancel(numbers[1])
    until_done(engine)
    assert engine.completion(numbers[0]).token_ids == alone(loaded, Request((9, 10), 20)).token_ids[:3]
    assert engine.completion(numbers[2]) == alone(loaded, Request((9, 12), 20))
    assert_is_empty(engine)


def test_nothing_runs_once_the_last_request_was_cancelled(loaded: LoadedModel) -> None:
    """No step() comes after it: the step that ran would be read when the next request comes, and timed until then."""
    engine = Engine(loaded, BASE)
    number = engine.submit(Request((9, 10), 20))
    engine.step()
    assert engine._unread
    engine.cancel(number)
    assert not engine.has_work
    assert not engine._unread
    assert_is_empty(engine)


def test_no_step_runs_while_a_function_is_called_between_two(loaded: LoadedModel) -> None:
    """No step runs on the device either: so the function may change a step's inputs."""
    engine = Engine(loaded, BASE)

    async def main() -> tuple[list[int], Completion]:
        async with AsyncEngine(engine) as front:
            served = asyncio.create_task(front.complete(Request((9, 10, 11), 30)))
            unread = []
            while not served.done():
                unread.append(await front.between_steps(lambda: len(engine._unread)))
            return unread, await served

    unread, done = asyncio.run(main())
    assert len(unread) > 2
    assert set(unread) == {0}
    assert done == alone(loaded, Request((9, 10, 11), 30))


def test_checked_and_replayed_steps_give_the_same_tokens(loaded: LoadedModel) -> None:
    """A step that runs once more for the check reads the same tokens again."""
    engine = Engine(loaded, replace(BASE, graphs=True, check_every=1))
    wanted = [Request((9, 10 + n), 12, Sampling(0.7 * n, seed=n)) for n in range(3)]
    assert engine.generate(wanted) == [alone(loaded, request) for request in wanted]
    metrics = engine.report().metrics
    assert metrics.replays > 5
    assert (metrics.samples > 10, metrics.rows_differ, metrics.attention_differs) == (True, 0, 0)


def test_a_request_is_counted_once_a_token(loaded: LoadedModel) -> None:
    engine = Engine(loaded, BASE)
    engine.generate([Request((9, 10), 6, stop_token_ids=(11,)), Request((12,), 4)])
    metrics = engine.report().metrics
    assert metrics.new_tokens == metrics.first_token_seconds.count + metrics.token_gap_seconds.count
    assert metrics.step_seconds.count == metrics.host_seconds.count == metrics.steps


@pytest.mark.parametrize("steps_ahead", [-1, 2])
def test_only_one_step_may_be_ahead(steps_ahead: int) -> None:
    with pytest.raises(BadSetting, match=f"steps_ahead is {steps_ahead}; it must be"):
        EngineOptions(steps_ahead=steps_ahead)


def test_a_gpu_is_kept_busy_and_a_cpu_has_nothing_to_wait_for() -> None:
    assert [EngineOptions().steps_ahead_on(kind) for kind in ("cpu", "cuda")] == [0, 1]
    assert EngineOptions(steps_ahead=0).steps_ahead_on("cuda") == 0


class _Unlucky:
    """Picks another token than the likeliest for one row, once."""

    def __init__(self, picker: TokenPicker) -> None:
        self._pick, self._left = picker.pick, 3

    def pick(self, logits: Tensor, draws: Mapping[int, Draw]) -> PickedTokens:
        self._left -= 1
        return self._pick(-logits if not self._left else logits, draws)


def test_what_is_read_is_what_the_next_step_went_on_with(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong pick leads to other tokens after it, and the read tokens are those that follow from it."""
    engine, request = Engine(loaded, BASE), Request((9, 10, 11), 8)
    monkeypatch.setattr(engine._picker.plain, "pick", _Unlucky(engine._picker.plain).pick)
    (done,) = engine.generate([request])
    right = alone(loaded, request).token_ids
    assert done.token_ids[:2] == right[:2]
    assert done.token_ids[2] != right[2]
    after = Request((*request.prompt_token_ids, *done.token_ids[:3]), 5)
    assert done.token_ids[3:] == alone(loaded, after).token_ids
