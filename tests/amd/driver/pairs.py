"""Pairs: every ordered pair of verbs, and triples at random, each between rows that have tokens and a closing look."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rocm_attn.errors import Unsupported
from rocm_attn.guards.registry import Guards
from tests.amd.driver.finding import Finding
from tests.amd.driver.scene import KINDS, Scene
from tests.amd.driver.verbs import VERBS, clear, prefill, settle

LAST_CALLS = 10
TRIPLES_OF_A_SEED = 12


@dataclass(frozen=True, slots=True)
class PairsOutcome:
    """What came of some sequences of verbs. findings: one for each runtime that was given up"""

    findings: tuple[str, ...]
    num_sequences: int
    counts: dict[str, int]
    replays: int
    captures: int


def pairs() -> list[tuple[str, ...]]:
    """Every ordered pair, each verb with itself too."""
    return [(one, other) for one in VERBS for other in VERBS]


def triples(seed: int, count: int = TRIPLES_OF_A_SEED) -> list[tuple[str, ...]]:
    """Three to five verbs at random."""
    rng = random.Random(seed)
    return [tuple(rng.choice(list(VERBS)) for _ in range(rng.choice((3, 3, 4, 5)))) for _ in range(count)]


def drive(
    sequences: Sequence[tuple[str, ...]], kind: str, seed: int, device: torch.device, guards: Guards | None = None
) -> PairsOutcome:
    """Run sequences of verbs in runtimes of a kind: a new one where there was a finding. A kind no kernel serves: none.

    guards: not given, those of the environment
    """
    findings: list[str] = []
    counts: dict[str, int] = {}
    replays = captures = done = 0
    for scene, its in _scenes(sequences, kind, seed, device, guards):
        for verbs in its:
            done += 1
            finding = _run(scene, verbs)
            if finding:
                findings.append(f"{kind}, {' > '.join(verbs)}: {finding} | after: {'; '.join(scene.log[-LAST_CALLS:])}")
                break
        for what, count in scene.counts.items():
            counts[what] = counts.get(what, 0) + count
        for runner in (scene.runner, scene.drafter):
            replays, captures = replays + runner.counters.replays, captures + runner.counters.captures
    return PairsOutcome(tuple(findings), done, counts, replays, captures)


def kind_of(seed: int) -> str:
    """The kind of runtime that a seed of triples drives."""
    return KINDS[seed % len(KINDS)]


def run_triples(seed: int, device: torch.device, guards: Guards | None = None) -> PairsOutcome:
    """The triples of a seed."""
    return drive(triples(seed), kind_of(seed), seed, device, guards)


def _scenes(
    sequences: Sequence[tuple[str, ...]], kind: str, seed: int, device: torch.device, guards: Guards | None
) -> Iterator[tuple[Scene, Iterator[tuple[str, ...]]]]:
    """A scene, and the sequences that are left for it: it is over when the caller stops taking them."""
    left = iter(sequences)
    done = False

    def its() -> Iterator[tuple[str, ...]]:
        nonlocal done
        yield from left
        done = True

    while not done:
        try:
            scene = Scene(kind, seed, device, guards)
        except Unsupported:
            return
        seed += 1_000_003
        yield scene, its()


def _run(scene: Scene, verbs: Sequence[str]) -> str:
    """What went wrong in a sequence of verbs, or nothing."""
    try:
        clear(scene)
        prefill(scene)
        scene.say(f"-- {' > '.join(verbs)}")
        for verb in verbs:
            VERBS[verb](scene)
            scene.compare_pool(verb)
        settle(scene)
    except Finding as found:
        return str(found)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""
