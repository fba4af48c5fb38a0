"""Every ordered pair of calls, some triples, and that the tester sees what it is there for."""

import pytest
import torch

from rocm_attn.guards.registry import Guards
from rocm_lab.soak.setting import DRAWN
from tests.amd.random_calls.pairs import ENGINE, SERVER, STATES, Side, drive, is_found, run_triples

SIDES = (SERVER, ENGINE, STATES)
PAIRS = [(side, kind, part) for side in SIDES for kind in side.kinds for part in range(1, side.parts)]


@pytest.mark.nightly  # test_doors.py drives part 0, and watches what it calls
@pytest.mark.parametrize(("side", "kind", "part"), PAIRS, ids=lambda each: "" if isinstance(each, Side) else str(each))
def test_every_pair_of_calls_is_refused_reported_or_right(
    side: Side, kind: str, part: int, device: torch.device
) -> None:
    outcome = drive(side, kind, side.part(kind, part), 1, device)
    assert not outcome.findings, "\n".join(outcome.findings)


def test_every_pair_is_driven_and_every_call_comes_first_and_second_in_every_run() -> None:
    for side in SIDES:
        its = [pair for pairs in side.pairs().values() for pair in pairs]
        assert len({*its}) == len(its) == len(side.verbs) ** 2
        parts = [[pair for kind in side.kinds for pair in side.part(kind, part)] for part in range(side.parts)]
        assert sorted(its) == sorted(pair for part in parts for pair in part)
        for place in range(2):
            assert {pair[place] for pair in parts[0]} == {*side.verbs}


def test_a_seed_is_the_same_every_time(device: torch.device) -> None:
    assert run_triples(5, device) == run_triples(5, device)


@pytest.mark.parametrize("seed", [1, 3, 4, 5])
def test_calls_over_drawn_runtimes_are_refused_reported_or_right(seed: int, device: torch.device) -> None:
    outcome = drive(SERVER, DRAWN, SERVER.triples(seed), seed, device)
    assert not outcome.findings, "\n".join(outcome.findings)
    assert outcome.counts["calls compared"] > 500


SERVERS = {
    "draft_order": 0,
    "draft_lengths": 0,
    "table_first": 0,
    "batch_check": 1,
    "copy_on_write": 10,
    "state_lineage": 7,
    "sent_state": 27,
}
ENGINES = {
    **dict.fromkeys(("pads", "store_drops", "full_refresh", "length_bounds", "v_mask", "table_moved", "last_steps"), 2),
    "slots_in_table": 2,
    "null_page": 5,
    "head_weights": 5,
    "capacity": 17,
    "finite_kv": 17,
}


@pytest.mark.parametrize(("guard", "finds"), [*SERVERS.items(), *ENGINES.items()])
def test_a_safeguard_that_is_off_is_found_within_ninety_seeds(guard: str, finds: int, device: torch.device) -> None:
    """finds: a seed that has found it before, and is tried first; every third one's calls are those of an engine"""
    guards, seeds = Guards().without(guard), range(2, 90, 3) if guard in ENGINES else range(90)
    assert any(is_found(seed, device, guards) for seed in (finds, *seeds))
