"""Aborts, preemptions, prefix hits, tenants, faults and draft tokens in one run: every output is the reference's."""

from __future__ import annotations

import pytest
import torch

from tests.amd.runner.engine_worlds import World, run_worlds

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
