"""Aborts, preemptions, prefix hits, tenants, faults and draft tokens in one run: every output is the reference's."""

from __future__ import annotations

from collections.abc import Sequence as Many

import pytest
import torch

from rocm_attn.errors import BadLogits
from rocm_serve.speculation import speculation
from rocm_serve.speculation.drafts import DraftTree
from tests.amd.runner.engine_worlds import SCRIPT, Run, World, run_worlds

nightly = pytest.mark.nightly


@pytest.mark.parametrize(
    ("seed", "steps_ahead"),
    [
        pytest.param(3, 0, id="windows, graphs"),
        pytest.param(2, 1, id="windows, a step ahead"),
    ],
)
def test_every_output_is_that_of_dense_attention(seed: int, steps_ahead: int) -> None:
    run_worlds([World.plain(seed, 25, steps_ahead)])


@nightly
@pytest.mark.parametrize("steps_ahead", [0, 1], ids=["", "ahead"])
@pytest.mark.parametrize("seed", range(64))
def test_every_output_of_a_longer_run_is(seed: int, steps_ahead: int) -> None:
    """One in five in deterministic mode."""
    run_worlds([World.plain(seed, 150, steps_ahead)])


def test_every_text_with_draft_tokens_is_that_of_plain_decoding() -> None:
    counts = run_worlds([World.speculating(seed, 5) for seed in (2, 3, 88)])
    assert counts["accepted_drafts"] < counts["drafts"]


@nightly
@pytest.mark.parametrize("first", range(0, 210, 21))
def test_every_text_of_more_worlds_is(first: int, device: torch.device) -> None:
    counts = run_worlds([World.speculating(seed) for seed in range(first, first + 21)], device)
    assert min(counts.values()) > 10


@nightly
def test_a_draft_that_is_taken_for_right_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first draft of each tree is accepted, regardless of the model."""

    def first_of_each(rows: Many[int | BadLogits], drafts: DraftTree) -> tuple[Many[int | BadLogits], list[int]]:
        return ([drafts.token_ids[0], rows[1]], [0]) if len(drafts) else (rows[:1], [])

    worlds = map(World.speculating, range(100))
    world = next(each for each in worlds if each.way == SCRIPT and each.options.topk > 1)
    monkeypatch.setattr(speculation, "_found_right", first_of_each)
    with pytest.raises(AssertionError, match=f"world {world.seed}: {SCRIPT}, .* request"):
        Run(world).run()
