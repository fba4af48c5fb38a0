"""Ten seeds of the random driver, and that it sees what it is there for."""

from __future__ import annotations

import pytest
import torch

from rocm_attn.guards.registry import Guards
from tests.amd.driver.run import run_seed

SEEDS_A_TEST = 5


@pytest.mark.parametrize("first", range(0, 10, SEEDS_A_TEST))
def test_no_seed_finds_a_wrong_result_that_no_fault_reported(first: int, device: torch.device) -> None:
    outcomes = [run_seed(seed, device) for seed in range(first, first + SEEDS_A_TEST)]
    findings = [f"seed {outcome.seed}: {outcome.finding}" for outcome in outcomes if outcome.finding]
    assert not findings, "\n".join(findings)
    assert sum(outcome.num_compared for outcome in outcomes) > 50


def test_a_seed_is_the_same_every_time(device: torch.device) -> None:
    assert run_seed(7, device) == run_seed(7, device)


@pytest.mark.parametrize(
    "guard", ["batch_check", "copy_on_write", "echo_check", "full_refresh", "kept_ids", "table_first"]
)
def test_a_safeguard_that_is_off_is_found_within_thirty_seeds(guard: str, device: torch.device) -> None:
    guards = Guards().without(guard)
    assert any(run_seed(seed, device, guards).finding for seed in range(30))
