"""One seed, from a fresh runtime to an empty one."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from rocm_attn.guards.registry import Guards
from tests.amd.driver.finding import Finding
from tests.amd.driver.moves import finish, move
from tests.amd.driver.world import World

FEWEST_MOVES, MOST_MOVES = 18, 36
LAST_MOVES = 6


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a seed.

    finding:      what went wrong unreported, with the last moves; or nothing
    num_moves:    made
    num_compared: tokens that were compared with the oracle, a layer at a time
    replays, captures: of graphs
    reported:     how often something was reported or refused
    """

    seed: int
    finding: str
    num_moves: int = 0
    num_compared: int = 0
    replays: int = 0
    captures: int = 0
    reported: dict[str, int] | None = None


def run_seed(seed: int, device: torch.device, guards: Guards | None = None) -> Outcome:
    """Drive one runtime. guards: not given, those of the environment."""
    world = World(seed, device, guards)
    # Moves are drawn from numbers of their own: a seed's setting says nothing of their order.
    num_moves = random.Random(seed + 1).randint(FEWEST_MOVES, MOST_MOVES)
    finding = ""
    try:
        for _ in range(num_moves):
            move(world)
            world.check_counts(nothing_waits=False)
        finish(world)
    except Finding as found:
        finding = str(found)
    except Exception as error:
        # Whatever is no word of the runtime's own came from inside it.
        finding = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if finding:
        finding = f"{finding} | after: {'; '.join(world.log[-LAST_MOVES:])}"
    counters = world.runner.counters
    return Outcome(
        seed, finding, len(world.log), world.num_compared, counters.replays, counters.captures, dict(world.reported)
    )
