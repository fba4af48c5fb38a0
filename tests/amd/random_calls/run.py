"""One seed: moves over one random runtime, from a fresh one to an empty one; and triples of calls over small ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Final

import torch

from rocm_attn.guards.registry import Guards
from tests.amd.random_calls.finding import Outcome, finding_of
from tests.amd.random_calls.moves import finish, move
from tests.amd.random_calls.pairs import run_triples
from tests.amd.random_calls.world import World

FEWEST_MOVES, MOST_MOVES = 18, 36
LAST_MOVES = 6


def run_moves(seed: int, device: torch.device, guards: Guards | None = None) -> Outcome:
    """Drive one runtime. guards: not given, those of the environment."""
    world = World(seed, device, guards)
    # Moves are drawn from numbers of their own: a seed's setting says nothing of their order.
    num_moves = random.Random(seed + 1).randint(FEWEST_MOVES, MOST_MOVES)

    def life() -> None:
        for _ in range(num_moves):
            move(world)
            world.check_counts(nothing_waits=False)
        finish(world)

    finding = finding_of(life)
    counters = world.runner.counters
    counts = {
        "moves": len(world.log),
        "outputs compared": world.num_compared,
        "replays": counters.replays,
        "captures": counters.captures,
        **{f"moves {what}": count for what, count in world.reported.items()},
    }
    return Outcome((f"{finding} | after: {'; '.join(world.log[-LAST_MOVES:])}",) if finding else (), counts)


TESTERS: Final[Mapping[str, Callable[[int, torch.device, Guards | None], Outcome]]] = {
    "moves": run_moves,
    "pairs": run_triples,
}


def run_testers(
    seed: int, device: torch.device, guards: Guards | None = None, testers: Collection[str] = tuple(TESTERS)
) -> Outcome:
    """A seed of some testers. guards: not given, those of the environment"""
    outcomes = [TESTERS[tester](seed, device, guards) for tester in testers]
    counts = Counter[str]()
    for outcome in outcomes:
        counts.update(outcome.counts)
    return Outcome(tuple(finding for outcome in outcomes for finding in outcome.findings), dict(counts))
