"""Rounds of drafts that follow each other on the device: the same texts, regardless of what happens in between."""

import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from rocm_attn.errors import DeviceFault
from rocm_attn.kernels.metadata.error_word import ERROR_WORD, LENGTH_BEYOND_BOUND
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.request import Completion, Event, Request, TokenEvent
from rocm_serve.speculation import device_steps as rounds_module
from rocm_serve.speculation.device_steps import (
    AHEAD_SECONDS,
    FEWEST_AHEAD,
    MOST_AHEAD,
    DeviceSpeculation,
    Pace,
    SpeculativePicks,
    why_no_speculative_steps,
)
from tests.amd.runner.round_texts import CIRCLE, OPTIONS, launched, round_model
from tests.amd.runner.serving import faults_until_done, served_to_the_end, until_done
from tests.amd.runner.tiny_model import CONFIG

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAIN = replace(OPTIONS, speculative="off", draft_tokens=4, steps_ahead=0)
WINDOWS = (9, -1)


@cache
def _model() -> LoadedModel:
    return round_model(DEVICE, windows=WINDOWS)


def engine_of(loaded: LoadedModel | None = None, **changes: Any) -> Engine:
    """An engine of a model with windows, which have a pool of their own."""
    return Engine(_model() if loaded is None else loaded, replace(OPTIONS, **{"swa_pages": 120, **changes}))


def a_request(seed: int, new_tokens: int = 60, **options: Any) -> Request:
    draw = random.Random(seed)
    prompt = tuple(draw.randrange(CONFIG.vocab_size) for _ in range(draw.randrange(2, 20)))
    return Request(prompt, new_tokens, **options)


def plainly(requests: Many[Request], loaded: LoadedModel | None = None) -> list[Completion]:
    """Returns plain decoding's completions, from one pool."""
    return list(_plain(tuple(requests))) if loaded is None else Engine(loaded, PLAIN).generate(requests)


@cache
def _plain(requests: tuple[Request, ...]) -> tuple[Completion, ...]:
    """Many tests compare the texts of the same requests."""
    return tuple(Engine(_model(), PLAIN).generate(requests))


def rounds_of(engine: Engine) -> DeviceSpeculation:
    assert isinstance(engine._speculative_steps, DeviceSpeculation)
    return engine._speculative_steps


def at_pace(num_ahead: int, engine: Engine) -> Engine:
    """The engine, which waits for the oldest rounds when num_ahead are launched, however long they take."""
    engine._pace.num_ahead = num_ahead
    engine._pace.note = lambda seconds: None  # type: ignore[method-assign]
    return engine


def until_unread(engine: Engine, num: int = 2) -> DeviceSpeculation:
    """Steps until that many rounds have been launched and not read."""
    rounds = rounds_of(engine)
    while rounds._series is None or rounds._series.num_pending < num:
        engine.step()
    return rounds


def steps(engine: Engine) -> Iterator[Many[Event]]:
    while engine.has_work:
        yield engine.step()


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """Its texts repeat every 16 tokens.

    With two draft tokens a round brings three: as many rounds as there are memories do not end where they began, so
    losing or swapping some changes the text.
    """
    return round_model(DEVICE, circle=16)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *(pytest.param(changes, marks=pytest.mark.nightly) for changes in ({"graphs": True}, {"steps_ahead": 0})),
    ],
)
@pytest.mark.parametrize("num_ahead", [2, pytest.param(6, marks=pytest.mark.nightly)])
def test_the_texts_are_those_of_plain_decoding(num_ahead: int, changes: dict[str, Any], loaded: LoadedModel) -> None:
    """Some end by a token, others by their length, within rounds and between them."""
    requests = [a_request(seed, 50 + 7 * seed) for seed in range(4)]
    texts = [done.token_ids for done in plainly(requests, loaded)]
    requests[1] = replace(requests[1], stop_token_ids=(texts[1][33],))
    requests[2] = replace(requests[2], stop_token_ids=(texts[2][41],))
    engine = at_pace(num_ahead, Engine(loaded, replace(OPTIONS, draft_tokens=2, **changes)))
    rounds, emitted, noted = launched(engine), dict[int, list[int]](), list[float]()
    engine._pace.note = noted.append  # type: ignore[method-assign, assignment]

    def note(event: Event) -> None:
        assert isinstance(event, TokenEvent)
        emitted.setdefault(event.request, []).append(event.token_id)

    done = engine.generate(requests, note)
    assert done == plainly(requests, loaded)
    assert list(emitted.values()) == [list(each.token_ids) for each in done]
    metrics = engine.report().metrics
    assert len(noted) >= len(rounds) > 0
    assert 0 < metrics.accepted_drafts < metrics.drafts
    assert (metrics.step_seconds.count, metrics.host_seconds.count) == (metrics.steps, metrics.steps)
    assert metrics.token_gap_seconds.count == metrics.new_tokens - len(requests)


@pytest.mark.fast
@pytest.mark.parametrize("pace", [2, 6])
def test_a_round_publishes_nothing_and_is_launched_before_the_last_one_is_read(
    pace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = at_pace(pace, engine_of())
    engine.submit(a_request(1, 200))
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


@pytest.mark.fast
@pytest.mark.parametrize("at", ["round", "picks", "next_step"])
def test_memory_that_runs_out_while_a_round_is_launched_changes_no_text(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [a_request(seed, 60) for seed in range(2)]
    engine = engine_of()
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
    assert served_to_the_end(engine, numbers) == plainly(requests)


def test_a_step_of_others_between_two_rounds_ends_the_series() -> None:
    requests = [a_request(seed, 60) for seed in range(2)]
    engine = engine_of(graphs=True, max_kv_len=100, max_batch_size=2)
    numbers = [engine.submit(request) for request in requests]
    until_unread(engine)
    engine.capture_all(lambda done, total, name: None)
    assert served_to_the_end(engine, numbers) == plainly(requests)


def test_the_host_plans_a_step_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "_MOST_SPECULATIVE_STEPS", 3)
    engine, most = engine_of(), 0
    number, rounds = engine.submit(a_request(1, 100)), rounds_of(engine)
    for _ in steps(engine):
        most = max(most, rounds._series.num_launched - 1 if rounds._series is not None else 0)
    assert most == 3
    assert [engine.completion(number)] == plainly([a_request(1, 100)])


def with_an_error_word(engine: Engine) -> None:
    """Sets it in the counts of the last launched step."""
    last = engine.runtime.gate.last
    assert last is not None
    last.inputs.counts[ERROR_WORD] = LENGTH_BEYOND_BOUND


def with_a_low_limit(engine: Engine) -> None:
    """Overwrites the limit of lengths, like a stray write."""
    rounds_of(engine)._limit.fill_(1)


@pytest.mark.parametrize("spoil", [with_an_error_word, with_a_low_limit])
def test_a_fault_in_a_round_ends_its_requests_before_the_host_plans_another_step(
    spoil: Callable[[Engine], None],
) -> None:
    engine = engine_of()
    number = engine.submit(a_request(1, 200))
    until_unread(engine)
    spoil(engine)
    with pytest.raises(DeviceFault, match="was outside of 0 <= q_len <= kv_len <= its bound"):
        until_done(engine)
    (done,) = served_to_the_end(engine, [number])
    assert (done.finish_reason, bool(done.error)) == ("error", True)
    again = a_request(3)
    assert engine.generate([again]) == plainly([again])


def test_a_row_that_nothing_can_be_picked_from_fails_its_request_alone() -> None:
    """This holds for any round: the tokens before it are handed out, and the others continue."""
    requests = [a_request(seed, 60) for seed in range(3)]
    wanted = plainly(requests)
    engine = engine_of()
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


def test_k_and_v_that_are_no_numbers_in_a_round_end_their_request_alone() -> None:
    loaded = round_model(DEVICE, windows=WINDOWS)
    requests = [of_circle(circle, 80) for circle in range(3)]
    wanted = plainly(requests, loaded)
    engine = engine_of(loaded)
    numbers, rounds = [engine.submit(request) for request in requests], rounds_of(engine)
    while rounds._series is None or rounds._series.num_launched < 4:
        engine.step()
    loaded.weights.embedding[CIRCLE + 2] = float("nan")
    faults = faults_until_done(engine)
    done = [engine.completion(number) for number in numbers]
    assert [done[0], done[2]] == [wanted[0], wanted[2]]
    assert done[1].error
    assert done[1].token_ids == wanted[1].token_ids[: len(done[1].token_ids)]
    assert engine.report().metrics.faults or "largest logit" in done[1].error
    assert len(faults) <= 1


@pytest.mark.parametrize("draft_tokens", [3, pytest.param(5, marks=pytest.mark.nightly)])
def test_a_prompt_of_as_many_tokens_as_a_round_is_not_taken_for_draft_tokens(draft_tokens: int) -> None:
    """It comes alone, next to a sequence that verifies drafts, and as the rest of a longer one after a prefix hit."""
    width = draft_tokens + 1
    tokens = (8, 32, 15, 63, 57, 60, 3, 41, 22, 50, 11, 2, 36, 19)
    engine = engine_of(draft_tokens=draft_tokens)
    alone = [Request(tokens[place : place + width], 12) for place in range(4)]
    assert [engine.generate([each])[0] for each in alone] == plainly(alone)
    engine.forget_prefixes()
    first, beside = a_request(1, 60), Request(tokens[2 : 2 + width], 20)
    numbers = [engine.submit(first)]
    while rounds_of(engine)._series is None:
        engine.step()
    numbers.append(engine.submit(beside))
    engine.step()
    assert engine._scheduler.num_running == 2, "it does not wait for the end of the rounds"
    assert served_to_the_end(engine, numbers) == plainly([first, beside])
    begins, longer = Request(tokens[:8], 9), Request(tokens[: 8 + width], 20)
    assert [engine.generate([each])[0] for each in (begins, longer)] == plainly([begins, longer])
    assert engine.metrics.prefix_hits


@pytest.mark.parametrize(
    ("changes", "num_ranks", "why"),
    [
        ({"speculative": "draft:it"}, 1, "speculative is draft:it, and only ngram drafts are looked up on the device"),
        ({"topk": 2}, 1, "topk is above 1, and the host looks up the trees of ngram drafts"),
        ({}, 2, "2 ranks share the model, and plan each step together"),
    ],
)
def test_the_host_plans_every_round_for_a_reason(changes: dict[str, Any], num_ranks: int, why: str) -> None:
    assert why_no_speculative_steps(replace(OPTIONS, **changes), num_ranks=num_ranks, looks_on=False) == why


def test_an_engine_says_why_the_host_plans_every_round() -> None:
    assert engine_of().report().speculative_steps == "follow from each other on the device"
    assert engine_of(check_every=5).report().speculative_steps == (
        "planned by the host: check_every, hang_after or flight_record is set, and needs each step on the host"
    )


@pytest.mark.parametrize("has_ended", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_fault_of_a_round_fails_none_that_had_ended_in_a_round_before(has_ended: bool, loaded: LoadedModel) -> None:
    """All of these rounds have the number of one step, by which the fault is reported.

    has_ended: whether the first request has its last token by then, in a round that was not read
    """
    requests = [a_request(1, 30), a_request(6, 120)]
    wanted = plainly(requests, loaded)
    engine = at_pace(6, Engine(loaded, replace(OPTIONS, draft_tokens=2)))
    numbers = [engine.submit(request) for request in requests]

    def num_launched() -> int:
        unread = [each.picks for each in engine._pending]
        found = sum(int(picks.emitted[0, 0]) for picks in unread if isinstance(picks, SpeculativePicks))
        return engine._outputs[numbers[0]].num_tokens + found

    while num_launched() < (30 if has_ended else 15) or len(engine._pending) < 3:
        engine.step()
    with_an_error_word(engine)  # as if the round that is launched next had set it
    faults = faults_until_done(engine)
    done = [engine.completion(number) for number in numbers]
    assert len(faults) == 1
    assert done[1].error
    assert (done[0] == wanted[0]) if has_ended else done[0].error


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_no_logits_are_kept_but_those_that_lie_in_the_memory_of_a_graph(graphs: bool, loaded: LoadedModel) -> None:
    engine = at_pace(6, Engine(loaded, replace(OPTIONS, draft_tokens=2, graphs=graphs)))
    rounds, requests = rounds_of(engine), [a_request(1, 80), a_request(2, 80)]
    launched, kept, run_again = list[Any](), list[Any](), engine._runner.run_again

    def and_note(batch: Any) -> Any:
        launched.append(run_again(batch))
        kept.append(rounds._series.launches.logits)  # type: ignore[union-attr]
        return launched[-1]

    engine._runner.run_again = and_note  # type: ignore[method-assign]
    assert engine.generate(requests) == plainly(requests, loaded)
    assert graphs or len(launched) > len(rounds._memory)
    assert any(each is not None for each in kept) == graphs


def test_the_pace_follows_from_how_long_rounds_take() -> None:
    pace = Pace()
    assert pace.num_ahead == FEWEST_AHEAD
    for seconds, num_ahead in (
        (AHEAD_SECONDS / 4.5, 4),
        (AHEAD_SECONDS / 100, MOST_AHEAD),
        (0.0, MOST_AHEAD),
        (AHEAD_SECONDS * 3, FEWEST_AHEAD),
    ):
        pace.note(seconds)
        assert pace.num_ahead == num_ahead
