"""Whole engines with speculation, in random worlds: every text is that of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence as Many

import pytest

from rocm_attn.errors import BadLogits
from rocm_serve.speculation import speculation
from rocm_serve.speculation.drafts import DraftTree
from tests.amd.runner.speculative_worlds import SCRIPT, World, run_world

COUNTS = ("drafts", "accepted_drafts", "preemptions", "prefix_hits", "aborts")


def served(seeds: range, num_requests: int) -> dict[str, int]:
    """Returns the counts of all worlds' metrics, added up."""
    worlds = [run_world(seed, num_requests) for seed in seeds]
    return {name: sum(getattr(metrics, name) for metrics in worlds) for name in COUNTS}


def test_every_text_of_a_random_world_is_that_of_plain_decoding() -> None:
    counts = served(range(2, 4), 5)
    assert min(counts.values()) > 0, f"the worlds do not show what they are for: {counts}"
    assert counts["accepted_drafts"] < counts["drafts"]


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 210, 21))
def test_every_text_of_more_worlds_is(first: int) -> None:
    counts = served(range(first, first + 21), 24)
    assert min(counts.values()) > 10, f"the worlds do not show what they are for: {counts}"


def is_of_trees(seed: int) -> bool:
    """True if a world's drafts are trees, mostly right."""
    world = World.of_seed(seed)
    return world.way == SCRIPT and world.options.topk > 1


@pytest.mark.nightly
def test_a_draft_that_is_taken_for_right_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first draft of each tree is accepted, regardless of the model."""

    def first_of_each(rows: Many[int | BadLogits], drafts: DraftTree) -> tuple[Many[int | BadLogits], list[int]]:
        return ([drafts.token_ids[0], rows[1]], [0]) if len(drafts) else (rows[:1], [])

    seed = next(filter(is_of_trees, range(100)))
    monkeypatch.setattr(speculation, "_found_right", first_of_each)
    with pytest.raises(AssertionError, match=f"world {seed}: {SCRIPT}, .* request"):
        run_world(seed)
