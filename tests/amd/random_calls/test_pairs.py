"""Every ordered pair of calls, some triples, and that the tester sees what it is there for."""

from __future__ import annotations

import pytest
import torch

from rocm_attn.guards.registry import Guards
from tests.amd.random_calls.pairs import ENGINE, SERVER, Side, drive, run_triples

PAIRS = [*((SERVER, kind) for kind in SERVER.kinds), *((ENGINE, kind) for kind in ENGINE.kinds)]


@pytest.mark.parametrize(("side", "kind"), PAIRS, ids=lambda each: each if isinstance(each, str) else "")
def test_every_pair_of_calls_is_refused_reported_or_right(side: Side, kind: str, device: torch.device) -> None:
    outcome = drive(side, kind, side.pairs()[kind], 1, device)
    assert not outcome.findings, "\n".join(outcome.findings)


def test_every_pair_is_driven() -> None:
    for side in (SERVER, ENGINE):
        its = [pair for pairs in side.pairs().values() for pair in pairs]
        assert len({*its}) == len(its) == len(side.verbs) ** 2


def test_a_seed_is_the_same_every_time(device: torch.device) -> None:
    assert run_triples(5, device) == run_triples(5, device)


@pytest.mark.parametrize(
    "guard", ["same_rows", "draft_order", "draft_lengths", "slots_in_table", "null_page", "kv_scales", "table_moved"]
)
def test_a_safeguard_that_is_off_is_found_within_sixty_seeds(guard: str, device: torch.device) -> None:
    guards = Guards().without(guard)
    assert any(run_triples(seed, device, guards).findings for seed in range(60))
