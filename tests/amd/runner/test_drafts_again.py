"""Drafts of rounds that graphs repeat: without a call of the model, a plan or a publication by the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rocm_serve.engine import Engine
from rocm_serve.speculation.device_trees import Trees
from rocm_serve.speculation.draft_tokens import ModelDraftTokens
from rocm_serve.speculation.drafts_again import DraftsAgain
from tests.amd.runner.test_device_steps import KINDS, Kind, at_pace, rounds_of


@pytest.fixture(params=["drafted", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("trees", "head"))])
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def full(kind: Kind) -> Engine:
    """An engine with graphs and as many rows as the requests need: none is free to check a graph on."""
    return kind.engine(graphs=True, max_batch_size=3, capture_after=0)


class Watched:
    """The drafts of each round of an engine.

    again: true if graphs alone have made them
    calls: of the drafting model's two forwards and of publications in the round
    begun: number of rounds drafted before each series
    """

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.again, self.calls, self.begun = list[bool](), list[int](), list[int]()
        draft_tokens = rounds_of(engine)._draft_tokens
        assert isinstance(draft_tokens, ModelDraftTokens)
        runners = draft_tokens._runners
        self._num_calls = 0
        for owner, name in (
            (runners._runner, "_body"),
            (runners.runtime.gate._publisher, "publish"),
        ):
            patch.setattr(owner, name, self._counting(getattr(owner, name)))
        draft, begin, run = draft_tokens.draft, draft_tokens.begin, DraftsAgain.run

        def and_watch(*arguments: Any) -> bool:
            self._num_calls = 0
            self.again.append(False)
            is_made = draft(*arguments)
            self.calls.append(self._num_calls)
            return is_made

        def and_note(drafts: DraftsAgain) -> Any:
            self.again[-1] = True
            return run(drafts)

        def and_begin(sequences: Any) -> bool:
            self.begun.append(len(self.again))
            return begin(sequences)

        patch.setattr(draft_tokens, "draft", and_watch)
        patch.setattr(draft_tokens, "begin", and_begin)
        patch.setattr(DraftsAgain, "run", and_note)

    def _counting(self, call: Any) -> Any:
        def and_count(*arguments: Any, **how: Any) -> Any:
            self._num_calls += 1
            return call(*arguments, **how)

        return and_count


def test_drafts_of_a_full_batch_are_made_by_graphs_alone(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host plans the first two of a series, and the rounds in which a text outgrows a length bucket."""
    requests = [kind.request(seed, 40) for seed in range(3)]
    engine = full(kind)
    watched = Watched(engine, monkeypatch)
    assert engine.generate(requests) == kind.plainly(requests)
    first_two = {first + more for first in watched.begun for more in (0, 1)}
    later = [place for place, is_again in enumerate(watched.again) if not is_again and place not in first_two]
    assert len(later) <= 2
    assert sum(watched.again) > 5
    assert {calls for calls, is_again in zip(watched.calls, watched.again, strict=True) if is_again} == {0}
    assert engine.metrics.fallbacks == {}
    draft_tokens = rounds_of(engine)._draft_tokens
    assert isinstance(draft_tokens, ModelDraftTokens)
    # A graph also moves the accepted drafts of trees into order.
    assert not isinstance(draft_tokens._planned_for, Trees) or draft_tokens._planned_for.accepting is not None


@pytest.mark.nightly
def test_a_length_beyond_what_is_reserved_is_cut_and_the_model_begins_anew(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts decide no token: no text changes, and no request fails.

    One request ends before the others, and the series with it: nothing checks faults in a series that ends with all.
    """
    requests = [kind.request(seed, new_tokens) for seed, new_tokens in enumerate((60, 60, 40))]
    engine = at_pace(2, full(kind))
    draft_tokens = rounds_of(engine)._draft_tokens
    assert isinstance(draft_tokens, ModelDraftTokens)
    reserve, left = DraftsAgain.reserve, list[int]()
    leave = draft_tokens._drafter.leave

    def and_leave(number: int) -> None:
        left.append(number)
        leave(number)

    monkeypatch.setattr(DraftsAgain, "reserve", lambda self, rows, most: reserve(self, rows, np.full_like(most, 12)))
    had_fault, faults = draft_tokens._had_fault, list[bool]()

    def and_note() -> bool:
        faults.append(had_fault())
        return faults[-1]

    monkeypatch.setattr(draft_tokens, "_had_fault", and_note)
    monkeypatch.setattr(draft_tokens._drafter, "leave", and_leave)
    assert engine.generate(requests) == kind.plainly(requests)
    assert any(faults)
    assert left
