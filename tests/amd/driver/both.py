"""Both random drivers of a seed: moves over one random runtime, and triples of calls over small ones."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import torch

from rocm_attn.guards.registry import Guards
from tests.amd.driver.pairs import run_triples
from tests.amd.driver.run import run_seed

DRIVERS: Final = ("moves", "pairs")


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of a seed. counts: calls and comparisons, by a word for each kind"""

    findings: tuple[str, ...]
    counts: dict[str, int]


def run_drivers(
    seed: int, device: torch.device, guards: Guards | None = None, drivers: Collection[str] = DRIVERS
) -> Findings:
    """A seed of some drivers. guards: not given, those of the environment"""
    findings: list[str] = []
    counts: dict[str, int] = {}
    if "moves" in drivers:
        moves = run_seed(seed, device, guards)
        findings += [moves.finding] if moves.finding else []
        counts |= {
            "moves": moves.num_moves,
            "outputs compared": moves.num_compared,
            "replays": moves.replays,
            "captures": moves.captures,
            **{f"moves {what}": count for what, count in (moves.reported or {}).items()},
        }
    if "pairs" in drivers:
        calls = run_triples(seed, device, guards)
        findings += calls.findings
        counts |= {f"calls {what}" if what != "sequences" else what: count for what, count in calls.counts.items()}
    return Findings(tuple(findings), counts)
