"""Ten seeds of the random tester, and that it sees what it is there for."""

from __future__ import annotations

import pytest
import torch

from rocm_attn.guards.registry import Guards
from tests.amd.random_calls.run import run_moves

SEEDS_A_TEST = 5


@pytest.mark.parametrize("first", range(0, 10, SEEDS_A_TEST))
def test_no_seed_finds_a_wrong_result_that_no_fault_reported(first: int, device: torch.device) -> None:
    outcomes = {seed: run_moves(seed, device) for seed in range(first, first + SEEDS_A_TEST)}
    findings = [f"seed {seed}: {finding}" for seed, outcome in outcomes.items() for finding in outcome.findings]
    assert not findings, "\n".join(findings)
    assert sum(outcome.counts["outputs compared"] for outcome in outcomes.values()) > 50


def test_a_seed_is_the_same_every_time(device: torch.device) -> None:
    assert run_moves(7, device) == run_moves(7, device)


@pytest.mark.parametrize(
    ("guard", "finds"),
    [
        ("batch_check", 9),
        ("copy_on_write", 9),
        ("echo_check", 0),
        ("full_refresh", 0),
        ("kept_ids", 6),
        ("table_first", 0),
    ],
)
def test_a_safeguard_that_is_off_is_found_within_thirty_seeds(guard: str, finds: int, device: torch.device) -> None:
    """finds: a seed that has found it before, and is tried first"""
    guards = Guards().without(guard)
    assert any(run_moves(seed, device, guards).findings for seed in (finds, *range(30)))
