"""Rounds of drafts that follow each other on the device: the same texts, regardless of what happens in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch

from rocm_attn.errors import DeviceFault
from rocm_attn.kernels.metadata.error_word import ERROR_WORD, LENGTH_BEYOND_BOUND
from rocm_attn.step.host_ring import Fence
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.request import Completion, Event, Request, TokenEvent
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.speculation import device_steps as rounds_module
from rocm_serve.speculation import engines
from rocm_serve.speculation.device_steps import DeviceSpeculation, why_no_speculative_steps
from tests.amd.runner.cache_invariants import check_cache
from tests.amd.runner.round_texts import CIRCLE, OPTIONS, round_model
from tests.amd.runner.serving import served_to_the_end, until_done
from tests.amd.runner.tiny_model import CONFIG
from tests.amd.runner.with_parameters import character_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BASE = replace(OPTIONS, provider="auto" if DEVICE.type == "cuda" else "torch")
PLAIN = replace(BASE, speculative="off", draft_tokens=4, steps_ahead=0)


@dataclass(frozen=True)
class Kind:
    """Rounds of a kind.

    changes: of the engine's options
    windows: of the model's layers
    """

    changes: dict[str, Any] = field(default_factory=dict)
    windows: tuple[int, ...] = ()

    @property
    def loaded(self) -> LoadedModel:
        return _round_model(self.windows)

    def options(self, **changes: Any) -> EngineOptions:
        return replace(BASE, **self.changes | changes)

    def engine(self, loaded: LoadedModel | None = None, **changes: Any) -> Engine:
        return Engine(self.loaded if loaded is None else loaded, self.options(**changes))

    def request(self, seed: int, new_tokens: int = 60, **options: Any) -> Request:
        draw = random.Random(seed)
        return Request(
            tuple(draw.randrange(CONFIG.vocab_size) for _ in range(draw.randrange(2, 20))), new_tokens, **options
        )

    def plainly(self, requests: list[Request], loaded: LoadedModel | None = None) -> list[Completion]:
        """Returns plain decoding's completions, from one pool and without an engine of this kind."""
        if loaded is None:
            return list(_plain_completions(self.windows, tuple(requests)))
        return Engine(loaded, PLAIN).generate(requests)


@cache
def _round_model(windows: tuple[int, ...]) -> LoadedModel:
    return round_model(DEVICE, windows=windows)


@cache
def _plain_completions(windows: tuple[int, ...], requests: tuple[Request, ...]) -> tuple[Completion, ...]:
    """Many tests compare the texts of the same requests."""
    return tuple(Engine(_round_model(windows), PLAIN).generate(requests))


KINDS = {
    "greedy": Kind(),
    "windows": Kind({"swa_pages": 120}, (9, -1)),
    "deterministic": Kind({"deterministic": True}),
}
# By day tests that name no kind show rounds with windows, and others those without; at night all have each kind.
BY_DAY = ("windows",)


def kinds(*by_day: str) -> pytest.MarkDecorator:
    """The kinds of every run, and at night all others."""
    others = [pytest.param(name, marks=pytest.mark.nightly) for name in KINDS if name not in by_day]
    return pytest.mark.parametrize("kind", [*by_day, *others], indirect=True)


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.nightly] * (name not in BY_DAY)) for name in KINDS])
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def rounds_of(engine: Engine) -> DeviceSpeculation:
    assert isinstance(engine._speculative_steps, DeviceSpeculation)
    return engine._speculative_steps


class Late:
    """A fence that is not reached before it is waited for. On a GPU the wrapped fence waits."""

    def __init__(self, fence: Fence) -> None:
        self.record, self.synchronize = fence.record, fence.synchronize

    def query(self) -> bool:
        """Does the same as `Fence.query`."""
        return False


def at_pace(num_ahead: int, engine: Engine) -> Engine:
    """The engine, which waits for the oldest rounds when num_ahead are launched, however long they take."""
    engine._pace.num_ahead = num_ahead
    engine._pace.note = lambda seconds, num_speculative_steps: None  # type: ignore[method-assign]
    for memory in rounds_of(engine)._memory:
        memory.done = Late(memory.done)
    return engine


def one_by_one(engine: Engine) -> Engine:
    rounds_of(engine).read_together = lambda *arguments: None  # type: ignore[method-assign]
    return engine


def counted(engine: Engine) -> list[int]:
    """Returns a list that gets a 1 for each round that the host has not planned."""
    rounds, launched = rounds_of(engine), list[int]()
    launch = rounds.launch

    def and_count() -> Any:
        launched.append(1)
        return launch()

    rounds.launch = and_count  # type: ignore[method-assign]
    return launched


def until_unread(engine: Engine, num: int = 2) -> DeviceSpeculation:
    """Steps until that many rounds have been launched and not read."""
    rounds = rounds_of(engine)
    while rounds._series is None or rounds._series.num_pending < num:
        engine.step()
    return rounds


def steps(engine: Engine) -> Iterator[Many[Event]]:
    while engine.has_work:
        yield engine.step()


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"steps_ahead": 0, "page_size": 1},
        # By day the rounds of test_device_step_graphs.py are graphs.
        pytest.param({"graphs": True, "draft_tokens": 5}, marks=pytest.mark.nightly),
        pytest.param({"graphs": True, "page_size": 16, "draft_tokens": 8}, marks=pytest.mark.nightly),
        pytest.param({"draft_tokens": 1, "page_size": 2}, marks=pytest.mark.nightly),
    ],
)
def test_texts_are_those_of_plain_decoding(changes: dict[str, Any], kind: Kind) -> None:
    requests = [kind.request(seed, 40 + 11 * seed) for seed in range(4)]
    engine = kind.engine(**changes)
    launched = counted(engine)
    assert engine.generate(requests) == kind.plainly(requests)
    metrics = engine.report().metrics
    assert launched  # the number that follow each other depends on the lengths that a graph is for
    assert 0 < metrics.accepted_drafts < metrics.drafts
    engine.forget_prefixes()
    assert all(pages.num_free_pages == pages.num_usable_pages for pages in engine.runtime.table.spaces)


@pytest.mark.fast
@pytest.mark.parametrize("pace", [2, 6])
def test_a_round_publishes_nothing_and_is_launched_before_the_last_one_is_read(
    pace: int, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = at_pace(pace, kind.engine())
    engine.submit(kind.request(1, 200))
    rounds, seen = rounds_of(engine), list[int]()
    launch = rounds.launch

    def without_the_host() -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(engine.runtime.gate._publisher, "publish", None)
            patch.setattr(engine.runtime.gate.planner, "plan", None)
            seen.append(len(engine._pending))
            return launch()

    rounds.launch = without_the_host  # type: ignore[method-assign]
    until_done(engine)
    assert len(seen) > 20
    assert max(seen) == pace


@kinds("greedy")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 12))])
def test_whatever_comes_in_between_changes_no_text(seed: int, kind: Kind) -> None:
    """Requests come, are aborted, stop, draw by a seed; pages are few, and prefixes are found."""
    draw = random.Random(seed)
    page_size, num_tokens = draw.choice([1, 2, 16]), draw.choice([330, 420, 900])
    few = 1 + num_tokens // page_size
    engine = kind.engine(
        page_size=page_size,
        num_pages=few,
        swa_pages=few if kind.options().swa_pages else 0,
        graphs=seed % 2 == 1,
        max_kv_len=160,
    )
    num_requests = 14 if seed else 7
    launched, aborted, requests, emitted = counted(engine), set[int](), list[Request](), dict[int, list[int]]()
    cache, table = engine._scheduler._cache, engine.runtime.table
    while engine.has_work or len(requests) < num_requests:
        if len(requests) < num_requests and draw.random() < 0.06:
            how: dict[str, Any] = {"sampling": Sampling(0.8, 0.9, seed=seed)} if draw.random() < 0.1 else {}
            if draw.random() < 0.4:
                how["stop_token_ids"] = (draw.randrange(CONFIG.vocab_size),)
            requests.append(kind.request(draw.randrange(6), draw.randrange(5, 120), **how))
            emitted[engine.submit(requests[-1])] = []
        if requests and draw.random() < 0.02:
            number = draw.randrange(len(requests))
            aborted.add(number)
            engine.abort(number)
        if engine.has_work:
            for event in engine.step():
                if isinstance(event, TokenEvent):
                    emitted[event.request].append(event.token_id)
            check_cache(cache, table)
    assert len(launched) > 10
    for number, wanted in enumerate(kind.plainly(requests)):
        done = engine.completion(number)
        assert tuple(emitted[number]) == done.token_ids
        if number in aborted and done.finish_reason == "abort":
            assert done.token_ids == wanted.token_ids[: len(done.token_ids)]
        else:
            assert (done.token_ids, done.finish_reason) == (wanted.token_ids, wanted.finish_reason)
    engine.forget_prefixes()
    assert all(pages.num_free_pages == pages.num_usable_pages for pages in table.spaces)


@kinds("greedy")
@pytest.mark.parametrize("place", [27, *(pytest.param(place, marks=pytest.mark.nightly) for place in (20, 33))])
def test_a_text_that_ends_by_its_words_in_the_first_of_two_rounds_ends_alone(place: int, kind: Kind) -> None:
    """It ends when the first is published; a request that comes then has both read at once."""
    with_words = replace(kind.loaded, tokenizer=character_model().tokenizer)
    long, other, late = kind.request(5, 60), kind.request(1, 60), kind.request(3, 10)
    said = kind.plainly([long], with_words)[0].text
    ends = said[place : place + 3] if said.index(said[place : place + 3]) == place else said[: place + 3]
    long = replace(long, stop=(ends,))
    engine = at_pace(2, kind.engine(with_words))
    numbers = [engine.submit(long), engine.submit(other)]
    output = engine._outputs[numbers[0]]
    while output.num_tokens + 4 * len(engine._pending) < place + 3 or len(engine._pending) < 2:
        engine.step()
    assert numbers[0] in engine._outputs
    numbers.append(engine.submit(late))
    assert served_to_the_end(engine, numbers) == kind.plainly([long, other, late], with_words)


@pytest.mark.fast
@pytest.mark.parametrize("at", ["round", "picks", "next_step"])
def test_memory_that_runs_out_while_a_round_is_launched_changes_no_text(
    at: str, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [kind.request(seed, 60) for seed in range(2)]
    engine = kind.engine()
    numbers, rounds = [engine.submit(request) for request in requests], rounds_of(engine)
    until_unread(engine)
    owner, name = {
        "round": (engine._runner, "run_again"),
        "picks": (rounds._picker, "picking"),
        "next_step": (rounds, "_emitted"),
    }[at]
    call = getattr(owner, name)

    def and_raise(*arguments: Any, **how: Any) -> Any:
        call(*arguments, **how)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, and_raise)
        with pytest.raises(MemoryError):
            engine.step()
    assert served_to_the_end(engine, numbers) == kind.plainly(requests)


@kinds("greedy")
def test_a_step_of_others_between_two_rounds_ends_the_series(kind: Kind) -> None:
    requests = [kind.request(seed, 60) for seed in range(2)]
    engine = kind.engine(graphs=True, max_kv_len=100, max_batch_size=2)
    numbers = [engine.submit(request) for request in requests]
    until_unread(engine)
    engine.capture_all(lambda done, total, name: None)
    assert served_to_the_end(engine, numbers) == kind.plainly(requests)


@kinds("greedy")
def test_the_host_plans_a_step_now_and_then(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "_MOST_SPECULATIVE_STEPS", 3)
    engine, most = kind.engine(), 0
    number, rounds = engine.submit(kind.request(1, 100)), rounds_of(engine)
    for _ in steps(engine):
        most = max(most, rounds._series.num_launched - 1 if rounds._series is not None else 0)
    assert most == 3
    assert [engine.completion(number)] == kind.plainly([kind.request(1, 100)])


@kinds("greedy")
def test_pages_are_reserved_before_a_round_may_come_to_need_them(kind: Kind) -> None:
    engine = kind.engine(page_size=1)
    engine.submit(kind.request(2, 250))
    rounds, table = rounds_of(engine), engine.runtime.table
    for _ in steps(engine):
        series = rounds._series
        if series is not None and not series.is_over and (table.room(series.rows) >= 0).all():
            # The inputs of the round after the last one are made at once.
            beyond = series.kv_len + 4 * series.num_pending
            assert (beyond <= table.room(series.rows)).all()
            assert (series.limit <= table.room(series.rows)).all()


@pytest.mark.parametrize("kind", ["greedy"], indirect=True)
def test_pages_of_a_series_are_reserved_at_once_where_plenty_are_free(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, for the longest possible text, and for the rounds that run on past its end."""
    monkeypatch.setattr(rounds_module, "_TOKENS_AHEAD", 8)
    engine = kind.engine()
    engine.submit(kind.request(1, 150))
    rounds, limits, begun = rounds_of(engine), list[int](), dict[int, Any]()
    reserved = rounds._reserved

    def and_note(*arguments: Any) -> Any:
        limit = reserved(*arguments)
        if limit is not None:  # the plan of a step has this limit of tokens
            limits.append(int(limit[0]))
        return limit

    rounds._reserved = and_note  # type: ignore[method-assign, assignment]
    for _ in steps(engine):
        if rounds._series is not None:
            begun[id(rounds._series)] = rounds._series
    assert len(limits) == len(begun) >= 1
    assert max(limits) < 250


def with_an_error_word(engine: Engine) -> None:
    """Sets it in the counts of the last launched step."""
    last = engine.runtime.gate.last
    assert last is not None
    last.inputs.counts[ERROR_WORD] = LENGTH_BEYOND_BOUND


def with_a_low_limit(engine: Engine) -> None:
    """Overwrites the limit of lengths, like a stray write."""
    rounds_of(engine)._limit.fill_(1)


@kinds("greedy")
@pytest.mark.parametrize("spoil", [with_an_error_word, with_a_low_limit])
def test_a_fault_in_a_round_ends_its_requests_before_the_host_plans_another_step(
    spoil: Callable[[Engine], None], kind: Kind
) -> None:
    engine = kind.engine()
    number = engine.submit(kind.request(1, 200))
    until_unread(engine)
    spoil(engine)
    with pytest.raises(DeviceFault, match="was outside of 0 <= q_len <= kv_len <= its bound"):
        until_done(engine)
    (done,) = served_to_the_end(engine, [number])
    assert (done.finish_reason, bool(done.error)) == ("error", True)
    again = kind.request(3)
    assert engine.generate([again]) == kind.plainly([again])


def test_a_row_that_nothing_can_be_picked_from_fails_its_request_alone(kind: Kind) -> None:
    """This holds for any round: the tokens before it are handed out, and the others continue."""
    requests = [kind.request(seed, 60) for seed in range(3)]
    wanted = kind.plainly(requests)
    engine = kind.engine()
    rounds, left = rounds_of(engine), [12]
    picking = engine._picker.plain.picking

    def and_spoil(logits: torch.Tensor, *others: Any, **how: Any) -> Any:
        left[0] -= 1
        is_spoilt = left[0] <= 0 and len(logits) == 12
        return picking(
            logits.index_fill(0, torch.tensor([5], device=logits.device), float("nan")) if is_spoilt else logits,
            *others,
            **how,
        )

    rounds._picker.picking = and_spoil  # type: ignore[method-assign]
    numbers = [engine.submit(request) for request in requests]
    for _ in steps(engine):
        if left[0] <= 0:
            rounds._picker.picking = picking  # type: ignore[method-assign]
    done = [engine.completion(number) for number in numbers]
    assert [done[0], done[2]] == [wanted[0], wanted[2]]
    assert done[1].token_ids == wanted[1].token_ids[: len(done[1].token_ids)]


def of_circle(circle: int, new_tokens: int) -> Request:
    """A request whose text repeats one of the model's circles of tokens."""
    first = circle * CIRCLE
    return Request(tuple(first + token % CIRCLE for token in range(CIRCLE + 3)), new_tokens)


@kinds("windows", "deterministic")
def test_k_and_v_that_are_no_numbers_in_a_round_end_their_request_alone(kind: Kind) -> None:
    loaded = round_model(DEVICE, windows=kind.windows)
    requests = [of_circle(circle, 80) for circle in range(3)]
    wanted = kind.plainly(requests, loaded)
    engine = kind.engine(loaded)
    numbers, rounds = [engine.submit(request) for request in requests], rounds_of(engine)
    while rounds._series is None or rounds._series.num_launched < 4:
        engine.step()
    loaded.weights.embedding[CIRCLE + 2] = float("nan")
    emitted = 0
    while engine.has_work:
        try:
            engine.step()
        except DeviceFault:
            emitted += 1
    done = [engine.completion(number) for number in numbers]
    assert [done[0], done[2]] == [wanted[0], wanted[2]]
    assert done[1].error
    assert done[1].token_ids == wanted[1].token_ids[: len(done[1].token_ids)]
    assert engine.report().metrics.faults or "largest logit" in done[1].error
    assert emitted <= 1


@kinds("greedy")
@pytest.mark.parametrize("draft_tokens", [3, pytest.param(5, marks=pytest.mark.nightly)])
def test_a_prompt_of_as_many_tokens_as_a_round_is_not_taken_for_draft_tokens(draft_tokens: int, kind: Kind) -> None:
    """It comes alone, next to a sequence that verifies drafts, and as the rest of a longer one after a prefix hit."""
    width = draft_tokens + 1
    tokens = (8, 32, 15, 63, 57, 60, 3, 41, 22, 50, 11, 2, 36, 19)
    engine = kind.engine(draft_tokens=draft_tokens)
    alone = [Request(tokens[place : place + width], 12) for place in range(4)]
    assert [engine.generate([each])[0] for each in alone] == kind.plainly(alone)
    engine.forget_prefixes()
    first, beside = kind.request(1, 60), Request(tokens[2 : 2 + width], 20)
    numbers = [engine.submit(first)]
    while rounds_of(engine)._series is None:
        engine.step()
    numbers.append(engine.submit(beside))
    assert served_to_the_end(engine, numbers) == kind.plainly([first, beside])
    begins, longer = Request(tokens[:8], 9), Request(tokens[: 8 + width], 20)
    assert [engine.generate([each])[0] for each in (begins, longer)] == kind.plainly([begins, longer])
    assert engine.metrics.prefix_hits


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": Sampling(0.7, 0.95, seed=3)},
        {"sampling": Sampling(logit_bias=((3, -4.0), (9, 2.0)))},
        {"allowed_token_ids": tuple(range(0, CONFIG.vocab_size, 3))},
    ],
    ids=["draws", "is biased", "has allowed tokens"],
)
def test_rounds_with_a_request_that_asks_for_more_than_the_likeliest_token_are_planned_by_the_host(
    options: dict[str, Any],
) -> None:
    """They have the texts of plain decoding; rounds go on without the host when that request has ended."""
    kind = KINDS["greedy"]
    requests = [kind.request(0, 70), kind.request(1, 24, **options)]
    engine = kind.engine()
    launched, numbers = counted(engine), [engine.submit(request) for request in requests]
    while numbers[1] in engine._outputs:
        engine.step()
    assert not launched
    assert engine.metrics.accepted_drafts
    assert served_to_the_end(engine, numbers) == kind.plainly(requests)
    assert launched


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"speculative": "eagle:seeded"},
            "speculative is eagle:seeded, and only ngram drafts are looked up on the device",
        ),
        ({"speculative": "draft:it"}, "speculative is draft:it, and only ngram drafts are looked up on the device"),
        ({"topk": 2}, "topk is above 1, and the host looks up the trees of ngram drafts"),
        (
            {"check_every": 5},
            "check_every, hang_after, profiler_ranges or flight_record is set, and needs each step on the host",
        ),
    ],
)
def test_an_engine_says_why_the_host_plans_every_round(
    changes: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS["greedy"]
    monkeypatch.setattr(engines, "load_model", lambda *which, **how: _round_model((5, -1)))
    assert kind.engine().report().speculative_steps == "follow from each other on the device"
    engine = kind.engine(**changes)
    assert engine.report().speculative_steps == f"planned by the host: {why}"
    requests = [kind.request(seed, 30) for seed in range(2)]
    assert engine.generate(requests) == kind.plainly(requests)


def test_the_host_plans_every_round_of_several_ranks() -> None:
    said = why_no_speculative_steps(KINDS["greedy"].options(), num_ranks=2, looks_on=False)
    assert said == "2 ranks share the model, and plan each step together"
