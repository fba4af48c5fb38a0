"""Models with recurrent layers in random worlds: each text is that of an engine that serves the request alone.

Requests share beginnings, are second turns, have tenants and priorities, give way, and some are aborted. The reference
has no prefix cache, no draft tokens and one request at a time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from rocm_attn.paging.state_pool import StatePool
from rocm_attn.step.metrics import Metrics
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.speculation.methods import NGRAM, OFF
from tests.amd.runner.engine_worlds import SCRIPT, WINDOWS, Run, World
from tests.amd.runner.recurrent_model import recurrent_model

nightly = pytest.mark.nightly
# Texts are not drafted, drafted by a script, or looked up in themselves.
UNDRAFTED = "undrafted"
WAYS = (UNDRAFTED, SCRIPT, NGRAM, UNDRAFTED, SCRIPT)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@dataclass(frozen=True)
class RecurrentWorld(World):
    """A world whose model has a recurrent layer, and few states for the prefix cache."""

    patch: pytest.MonkeyPatch

    @classmethod
    def of(cls, seed: int, patch: pytest.MonkeyPatch, num_requests: int = 24) -> RecurrentWorld:
        """Takes ways and page sizes in turn, and the rest at random."""
        draw = random.Random(seed)
        page_size, way = (2, 1, 16, 4)[seed % 4], WAYS[seed % len(WAYS)]
        num_tokens, window_left = draw.randrange(96, 160), draw.choice(WINDOWS)
        num_pages = 1 + num_tokens // page_size
        options = EngineOptions(
            speculative=OFF if way == UNDRAFTED else NGRAM,
            draft_tokens=draw.randrange(2, 8),
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
        return cls(seed, way, window_left, options, num_requests, patch)

    def model(self, device: torch.device | None = None) -> LoadedModel:
        """A new model of this world."""
        return recurrent_model(self.patch, *self.window_left, device=device)

    @property
    def plain_options(self) -> EngineOptions:
        """Options of the reference, which serves one request at a time."""
        return replace(super().plain_options, max_batch_size=1, state_checkpoints=None)


def counts(worlds: list[RecurrentWorld], device: torch.device | None = None) -> dict[str, int]:
    """Serves the requests of worlds; returns the sums of their counts."""
    found: list[Metrics] = [Run(world, device).run() for world in worlds]
    names = ("preemptions", "prefix_hits", "aborts", "drafts", "accepted_drafts", "replays")
    return {name: sum(getattr(metrics, name) for metrics in found) for name in names}


def test_every_text_is_that_of_an_engine_with_one_request(patch: pytest.MonkeyPatch) -> None:
    found = counts([RecurrentWorld.of(seed, patch, 10) for seed in (2, 5, 9)])
    assert min(found.values()) > 0, f"the worlds do not show what they are for: {found}"


@nightly
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_every_text_of_more_worlds_is(first: int, patch: pytest.MonkeyPatch, device: torch.device) -> None:
    found = counts([RecurrentWorld.of(seed, patch) for seed in range(first, first + 20)], device)
    assert min(found.values()) > 10


def test_a_state_that_is_not_copied_is_found(patch: pytest.MonkeyPatch) -> None:
    """Each copy has the right header and another state."""
    copy = StatePool.copy

    def of_another(states: StatePool, copies: list[object]) -> None:
        copy(states, copies)  # type: ignore[arg-type]
        for each in copies:
            states.memory[each.target].zero_()  # type: ignore[attr-defined]

    patch.setattr(StatePool, "copy", of_another)
    with pytest.raises(AssertionError, match=r"world 5: undrafted, .* request"):
        counts([RecurrentWorld.of(5, patch, 10)])
