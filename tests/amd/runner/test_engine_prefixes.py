"""The prefix cache of an engine: which tokens are not computed again, and that no wrong page is ever found."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import DeviceFault
from rocm_attn.step.echo import STEPS_UNTIL_ECHO
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.request import Request
from rocm_serve.scheduled_step import ScheduledStep
from rocm_serve.speculation.drafts import DraftTree
from tests.amd.runner.dense_attention import assert_greedy
from tests.amd.runner.engine_worlds import NanTokens
from tests.amd.runner.serving import engine as small_engine
from tests.amd.runner.serving import until_done
from tests.amd.runner.tiny_model import CONFIG, tiny_model

PAGE = 4
SHARED = tuple(range(20, 33))  # three pages, and a token


def engine(loaded: LoadedModel, **changes: Any) -> Engine:
    return small_engine(loaded, max_kv_len=96, **changes)


def hits(engine: Engine) -> int:
    return engine.report().metrics.prefix_hits


def chats(seed: int, num: int) -> list[Request]:
    """Requests with one of two system prompts, a few questions, and salts."""
    chooser = random.Random(seed)
    systems = [tuple(chooser.randrange(CONFIG.vocab_size) for _ in range(length)) for length in (23, 8)]
    questions = [tuple(chooser.randrange(CONFIG.vocab_size) for _ in range(length)) for length in (1, 4, 9, 15)]
    return [
        Request(
            chooser.choice(systems) + chooser.choice(questions),
            max_new_tokens=chooser.randrange(1, 12),
            cache_salt=chooser.choice(["", "", "tenant"]),
            prefix_caching=chooser.random() < 0.9,
        )
        for _ in range(num)
    ]


class IdealCache:
    """Every full page of stored tokens, known at once and for ever: only strings of tokens."""

    def __init__(self) -> None:
        self._known: set[tuple[str, tuple[int, ...]]] = set()
        self.hits = 0

    def serve(self, request: Request, new: tuple[int, ...]) -> None:
        if not request.prefix_caching:
            return
        salt, prompt, stored = request.cache_salt, request.prompt_token_ids, (*request.prompt_token_ids, *new[:-1])
        length = 0
        while length + PAGE < len(prompt) and (salt, prompt[: length + PAGE]) in self._known:
            length += PAGE
        self.hits += length
        self._known |= {(salt, stored[:end]) for end in range(PAGE, len(stored) + 1, PAGE)}


@pytest.mark.parametrize("turns", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_hits_are_those_of_an_ideal_cache_where_there_are_pages_for_everything(turns: int, loaded: LoadedModel) -> None:
    served, ideal = engine(loaded, num_pages=4000), IdealCache()
    for request in chats(1, 40):
        for _ in range(turns):
            (done,) = served.generate([request])
            ideal.serve(request, done.token_ids)
            request = replace(request, prompt_token_ids=(*done.prompt_token_ids, *done.token_ids, 5))
    assert hits(served) == ideal.hits > 500


@pytest.mark.fast(1)
def test_in_deterministic_mode_a_hit_changes_no_bit(graphs: bool, loaded: LoadedModel) -> None:
    """A hit moves the boundaries of chunks."""
    found = []
    for prefix_caching in (True, False):
        served = engine(loaded, deterministic=True, graphs=graphs, prefix_caching=prefix_caching)
        served.generate([Request(SHARED + tuple(range(17)), 6)])
        (done,) = served.generate([Request((*SHARED, 3, 1, 4, 1, 5), 8, logprobs=20)])
        found.append((done.token_ids, done.logprobs))
        assert hits(served) == (12 if prefix_caching else 0)
    assert found[0] == found[1]


def test_one_that_gave_way_finds_its_own_pages_again(loaded: LoadedModel) -> None:
    served = engine(loaded, max_batch_size=1)
    low = served.submit(Request(SHARED, 20, priority=1))
    for _ in range(10):
        served.step()
    high = served.submit(Request((1, 2, 3), 12))
    until_done(served)
    assert served.report().metrics.preemptions == 1
    assert hits(served) == 20, "the pages of 13 + 9 tokens"
    for number in (low, high):
        assert_greedy(loaded, served.completion(number))


def poison(engine: Engine, number: int, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the model find NaN in place of a request's first tokens, in the first `times` steps that store them."""
    left = [1] * times

    def first_token(batch: StepBatch) -> int | None:
        rows = {each.row for each in engine._scheduler._running if each.number == number}
        found = [seq for seq in np.flatnonzero(batch.kv_len == batch.q_len) if batch.rows[seq] in rows]
        return int(batch.q_len[: found[0]].sum()) if found and left and left.pop() else None

    NanTokens(engine, first_token, monkeypatch)


@pytest.mark.fast(3)
@pytest.mark.parametrize("late_by", range(STEPS_UNTIL_ECHO + 3))
@pytest.mark.parametrize("times", [1, 100], ids=["once", "always"])
def test_pages_of_a_step_with_a_fault_are_never_found(
    times: int, late_by: int, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others begin with the same tokens, one after each step: none reads the KV that the poisoned one has stored."""
    served = engine(loaded)
    poisoned = served.submit(Request(SHARED, 9))
    poison(served, poisoned, times, monkeypatch)
    for _ in range(late_by):
        served.step()
    others = []
    for first in range(3):
        others.append(served.submit(Request((*SHARED, first), 9)))
        served.step()
    until_done(served)
    for number in others:
        done = served.completion(number)
        assert_greedy(loaded, done)
        assert len(done.token_ids) == 9
    reasons = {1: "length", 100: "error"}
    assert served.completion(poisoned).finish_reason == reasons[times]
    (again,) = served.generate([Request((*SHARED, 60), 9)])
    assert_greedy(loaded, again)
    assert hits(served) >= 12, "the others' pages are found"


def test_what_is_computed_again_alone_uses_no_page_of_the_cache(
    poisoned: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, starts = engine(poisoned), set[int]()
    served.generate([Request(SHARED, 4)])
    for last in (1, 7):
        served.submit(Request((*SHARED, last, 1, 2), 20))
    next_step = served._scheduler.next_step

    def watched(drafts: Mapping[int, DraftTree]) -> ScheduledStep | None:
        step = next_step(drafts)
        if step is not None and step.is_of_a_suspect:
            starts.add(int(step.batch.kv_len[0] - step.batch.q_len[0]))
        return step

    monkeypatch.setattr(served._scheduler, "next_step", watched)
    until_done(served)
    assert hits(served) == 2 * 12, "when they were admitted, and not again"
    assert starts == {0, 16}, "whole prompts in chunks of 16"


def test_what_a_failed_request_held_leaves_the_cache(loaded: LoadedModel) -> None:
    """Its pages may hold the fault."""
    served = engine(tiny_model())
    served.generate([Request(SHARED, 2)])
    number = served.submit(Request((*SHARED, 1), 5))
    served.step()
    for layer in range(2):
        served.runtime.pool.layer(layer).k[1:] = float("nan")
    served.step()
    assert served.completion(number).finish_reason == "error"
    assert served.report().metrics.pages_in_use == 0
    (again,) = served.generate([Request((*SHARED, 1), 5)])
    assert_greedy(loaded, again)


def test_a_fault_of_no_step_empties_the_cache(loaded: LoadedModel) -> None:
    served = engine(loaded)
    served.generate([Request(SHARED, 5)])
    assert served.report().metrics.cached_pages > 0
    served._take_in(DeviceFault("something wrote to page 0"))
    assert served.report().metrics.pages_in_use == 0
