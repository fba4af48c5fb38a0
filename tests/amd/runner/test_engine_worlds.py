"""Engines in random worlds: every output is the reference's.

Requests share beginnings, are second turns, have tenants and priorities, give way, meet faults, and some are aborted.
Without draft tokens dense attention, and a recurrence in float64, are the reference. With them it is an engine without
draft tokens and prefix cache, which serves one request at a time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from rocm_attn.models.config import RecurrentConfig, RecurrentProjections
from rocm_attn.models.hf_recurrent import GATED_DELTA, KIMI_DELTA, STATE_SPACE
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.speculation.methods import NGRAM, OFF
from tests.amd.runner.engine_worlds import PLAIN, SCRIPT, WINDOWS, Run, World, run_worlds
from tests.amd.runner.tiny_model import CONFIG, LAYOUTS, RECURRENCE, tiny_model, with_nan_token, with_windows

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
@pytest.mark.parametrize("first", range(0, 210, 35))
def test_every_text_of_more_worlds_is(first: int, device: torch.device) -> None:
    """35 worlds in a row have each way with each number of branches: rounds on the device need one branch."""
    counts = run_worlds([World.speculating(seed) for seed in range(first, first + 35)], device)
    assert min(counts.values()) > 10


KINDS = (GATED_DELTA, KIMI_DELTA, STATE_SPACE)
WAYS = (PLAIN, SCRIPT, PLAIN, NGRAM, SCRIPT)


@dataclass(frozen=True)
class RecurrentWorld(World):
    """A world whose model has a recurrence of some kind, and few states for the prefix cache."""

    @classmethod
    def of(cls, seed: int, num_requests: int = 24) -> RecurrentWorld:
        """Takes ways, page sizes, kinds of recurrences and their places in turn, and the rest at random."""
        draw = random.Random(seed)
        page_size, way = (2, 1, 16, 4)[seed % 4], WAYS[seed % len(WAYS)]
        num_tokens, window_left = draw.randrange(96, 160), draw.choice(WINDOWS)
        num_pages, drafts = 1 + num_tokens // page_size, draw.randrange(2, 8)
        options = EngineOptions(
            speculative=OFF if way == PLAIN else NGRAM,
            draft_tokens=4 if way == PLAIN else drafts,
            page_size=page_size,
            num_pages=num_pages,
            swa_pages=draw.choice([0, num_pages]) if max(window_left) >= 0 else 0,
            max_batch_size=draw.choice([2, 6]),
            chunk=draw.choice([9, 16, 24]),
            max_kv_len=64,
            state_checkpoints=draw.choice([1, 3, 30]),
            graphs=draw.random() < 0.5,
            capture_after=draw.choice([0, 2]),
            steps_ahead=draw.choice([0, 1]),
            deterministic=True,
        )
        return cls(seed, way, window_left, options, num_requests)

    def model(self, device: torch.device | None = None) -> LoadedModel:
        """A new model of this world."""
        rule = KINDS[self.seed % len(KINDS)]
        # Each head of Kimi delta attention has a k of its own.
        form = replace(RECURRENCE.recurrent, rule=rule, num_key_heads=2 if rule is KIMI_DELTA else 1)
        mixer = RecurrentConfig(form, RecurrentProjections())
        base = LAYOUTS[self.seed // 2 % len(LAYOUTS)](CONFIG, mixer)
        loaded = tiny_model(base=with_windows(base, *self.window_left), device=device)
        return with_nan_token(loaded) if self.way == PLAIN else loaded

    @property
    def plain_options(self) -> EngineOptions:
        """Options of the reference, which serves one request at a time."""
        return replace(super().plain_options, max_batch_size=1, state_checkpoints=None)


def counts(worlds: Sequence[RecurrentWorld], device: torch.device | None = None) -> dict[str, int]:
    """Serves the requests of worlds; returns the sums of their counts."""
    found = [Run(world, device).run() for world in worlds]
    names = ("preemptions", "prefix_hits", "aborts", "faults", "drafts", "accepted_drafts", "replays")
    return {name: sum(getattr(metrics, name) for metrics in found) for name in names}


def test_every_text_is_that_of_the_reference() -> None:
    found = counts([RecurrentWorld.of(seed, 10) for seed in (0, 2, 5, 9, 10)])
    assert min(found.values()) > 0, f"the worlds do not show what they are for: {found}"


@nightly
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_every_text_of_more_worlds_with_states_is(first: int, device: torch.device) -> None:
    found = counts([RecurrentWorld.of(seed) for seed in range(first, first + 20)], device)
    assert min(found.values()) > 10
