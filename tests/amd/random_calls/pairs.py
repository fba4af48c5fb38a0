"""Pairs: every ordered pair of verbs, and triples at random, each between rows that have tokens and a closing look."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from rocm_attn.errors import Unsupported
from rocm_attn.guards.registry import Guards
from rocm_lab.soak.calls import LAST_CALLS, Calls
from rocm_lab.soak.finding import Finding
from rocm_lab.soak.scene import Scene
from rocm_lab.soak.setting import KINDS, STATES_IN_GRAPHS, WITH_STATES
from tests.amd.random_calls.engine_scene import ENGINE_KINDS, EngineScene
from tests.amd.random_calls.engine_verbs import ENGINE_VERBS, engine_clear, engine_prefill, engine_settle
from tests.amd.random_calls.verbs import STATE_VERBS, VERBS, clear, prefill, settle

SEQUENCES_OF_A_SEED = 12
SEED_OF_STATES = 7
# A new scene then undoes what verbs leave for good, such as a seal.
SEQUENCES_OF_A_SCENE = 60
Sequence_ = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a seed or of some sequences of calls.

    findings: what went wrong unreported, with the last calls
    counts:   calls, comparisons and what was reported or refused, by a word for each kind
    """

    findings: tuple[str, ...]
    counts: dict[str, int]


def finding_of(life: Callable[[], None]) -> str:
    """Runs a function. Returns what it finds, or an empty string."""
    try:
        life()
    except Finding as found:
        return str(found)
    except Exception as error:
        # Whatever is no word of the runtime's own came from inside it.
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


@dataclass(frozen=True, slots=True)
class Side:
    """Who makes the calls: a runtime's server, or an engine.

    make:  (kind, seed, device, guards) -> the scene
    homes: verb -> the kind in which it does most
    parts: of the pairs. Every run has one part, in which each call comes first and second; the night has the others
    """

    kinds: tuple[str, ...]
    homes: Mapping[str, str]
    verbs: Mapping[str, Callable[[Any], None]]
    make: Callable[..., Calls]
    clear: Callable[[Any], None]
    prefill: Callable[[Any], None]
    settle: Callable[[Any], None]
    parts: int = 29

    def pairs(self) -> dict[str, list[Sequence_]]:
        """Kind -> its share of every ordered pair of verbs, each verb with itself too."""
        found: dict[str, list[Sequence_]] = {kind: [] for kind in self.kinds}
        for one, other in product(enumerate(self.verbs), repeat=2):
            kind = self.kinds[(one[0] + other[0]) % len(self.kinds)]
            found[self.homes.get(other[1], self.homes.get(one[1], kind))].append((one[1], other[1]))
        return found

    def part(self, kind: str, number: int) -> list[Sequence_]:
        """Part `number` of a kind's pairs. Each verb comes first and second in each part, unless 3 divides `parts`."""
        at = {verb: place for place, verb in enumerate(self.verbs)}
        return [(one, other) for one, other in self.pairs()[kind] if (3 * at[one] + at[other]) % self.parts == number]

    def triples(self, seed: int) -> list[Sequence_]:
        """Three to five verbs at random."""
        rng, verbs = random.Random(seed), list(self.verbs)
        return [tuple(rng.choice(verbs) for _ in range(rng.choice((3, 3, 4, 5)))) for _ in range(SEQUENCES_OF_A_SEED)]


_HOMES = {
    "expanded": "latent",
    "scales_from_scratch": "eight bits",
    "captures": "graphs",
    "memory_runs_out": "drawn",
}
SERVER = Side(KINDS, _HOMES, VERBS, Scene, clear, prefill, settle)
STATES = Side(WITH_STATES, {"captures": STATES_IN_GRAPHS}, STATE_VERBS, Scene, clear, prefill, settle)
ENGINE = Side(ENGINE_KINDS, {}, ENGINE_VERBS, EngineScene, engine_clear, engine_prefill, engine_settle)


def drive(
    side: Side,
    kind: str,
    sequences: Sequence[Sequence_],
    seed: int,
    device: torch.device,
    guards: Guards | None = None,
) -> Outcome:
    """Run sequences of verbs in scenes of a kind: a new one after each finding. A kind that no kernel serves: none.

    guards: not given, those of the environment
    """
    counts = {"sequences": 0}
    return Outcome(tuple(findings_of(side, kind, sequences, seed, device, guards, counts)), counts)


def findings_of(
    side: Side,
    kind: str,
    sequences: Sequence[Sequence_],
    seed: int,
    device: torch.device,
    guards: Guards | None,
    counts: dict[str, int],
) -> Iterator[str]:
    """Does the same as `drive`, and yields each finding when it is made. counts: is added to"""
    for scene, its in _scenes(side, kind, sequences, seed, device, guards):
        for verbs in its:
            counts["sequences"] += 1
            finding = _run(side, scene, verbs)
            if finding:
                calls = "; ".join(scene.log[-LAST_CALLS:])
                yield f"{kind}, {' > '.join(verbs)}: {finding} | after: {calls}"
                break
        for what, count in scene.counts.items():
            counts[f"calls {what}"] = counts.get(f"calls {what}", 0) + count


def run_triples(seed: int, device: torch.device, guards: Guards | None = None) -> Outcome:
    """The sequences of a seed: every third one's are an engine's, and every tenth one's reach recurrent states."""
    counts = {"sequences": 0}
    return Outcome(tuple(findings_of(*_of_seed(seed), seed, device, guards, counts)), counts)


def is_found(seed: int, device: torch.device, guards: Guards) -> bool:
    """True if the sequences of a seed have a finding; the first one ends them."""
    return any(findings_of(*_of_seed(seed), seed, device, guards, {"sequences": 0}))


def _of_seed(seed: int) -> tuple[Side, str, list[Sequence_]]:
    side, number = (ENGINE, seed // 3) if seed % 3 == 2 else (SERVER, seed - seed // 3)
    if seed % 10 == SEED_OF_STATES:
        side, number = STATES, seed // 10
    return side, side.kinds[number % len(side.kinds)], side.triples(seed)


def _scenes(
    side: Side, kind: str, sequences: Sequence[Sequence_], seed: int, device: torch.device, guards: Guards | None
) -> Iterator[tuple[Calls, Iterator[Sequence_]]]:
    """A scene, and the sequences that are left for it: it is over when the caller stops taking them."""
    left = list(sequences)

    def its() -> Iterator[Sequence_]:
        for _ in range(min(SEQUENCES_OF_A_SCENE, len(left))):
            yield left.pop(0)

    while left:
        try:
            scene = side.make(kind, seed, device, guards)
        except Unsupported:
            return
        seed += 1_000_003
        yield scene, its()


def _run(side: Side, scene: Calls, verbs: Sequence_) -> str:
    """Returns the finding of a sequence of verbs, or an empty string."""

    def life() -> None:
        side.clear(scene)
        side.prefill(scene)
        scene.say(f"-- {' > '.join(verbs)}")
        for verb in verbs:
            side.verbs[verb](scene)
            scene.compare_pool(verb)
        side.settle(scene)

    return finding_of(life)
