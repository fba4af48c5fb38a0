"""The table of known-bad releases: faults that others reported in public, and whether they apply here.

known_bad.json has the rows. docs/known_bad.md shows them. Nothing here imports torch, as `rocm-attn doctor` uses it.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rocm_attn.machine.releases import UNKNOWN, Release, ReleaseRange

_CONTENT = json.loads(Path(__file__).with_suffix(".json").read_bytes())

ENGINES = ("vllm", "sglang", "atom")
COMPONENTS = (*ENGINES, "aiter", "rocm", "triton")
ARCHS = ("gfx942", "gfx950")
EFFECTS = ("wrong output", "crash", "hang", "no start", "slow")
# A feature that a model or a command line may ask for -> its name in a sentence.
FEATURES: Mapping[str, str] = _CONTENT["features"]
_ENDLESS = ReleaseRange().before


@dataclass(frozen=True, slots=True)
class Facts:
    """An installation and what it will serve, as far as they are known; a missing value or None is not known.

    releases:    component -> release; None: it is not installed
    model:       the class that a config.json names
    features:    keys of FEATURES
    heads:       query heads of a layer on one rank
    environment: variables
    """

    releases: Mapping[str, Release | None] = field(default_factory=dict)
    archs: frozenset[str] | None = None
    model: str | None = None
    features: Mapping[str, bool] = field(default_factory=dict)
    heads: frozenset[int] | None = None
    environment: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class KnownBad:
    """A fault that a public thread reports. It applies where every condition holds.

    thread:      owner/repository#number
    releases:    component -> the first bad release, and the first good one; the component at fault is first
    archs:       GPUs that it was seen on, or whose code has it
    seen:        the versions that the thread names
    end:         how the last bad release is known, or why it is not
    effect:      one of EFFECTS
    symptom:     a line of the thread
    models:      classes that a config.json names; none: any
    features:    keys of FEATURES that are all needed
    heads:       query heads on a rank, one of which is needed; none: any
    environment: variables and the values that are needed; "not 0" for any but 0
    remedy:      how to avoid it; empty if nothing is known but another release

    Raises ValueError for a row that says nothing, or names what is not known here.
    """

    thread: str
    releases: Mapping[str, ReleaseRange]
    archs: tuple[str, ...]
    seen: str
    end: str
    effect: str
    symptom: str
    models: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    heads: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    remedy: str = ""

    def __post_init__(self) -> None:
        said = {
            "thread": re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", self.thread),
            "releases": self.releases and all(span.since < span.before for span in self.releases.values()),
            "component": set(self.releases) <= set(COMPONENTS),
            "arch": self.archs and set(self.archs) <= set(ARCHS),
            "text": self.seen.strip() and self.end.strip() and self.symptom.strip() and "\n" not in self.symptom,
            "effect": self.effect in EFFECTS,
            "feature": set(self.features) <= set(FEATURES),
            "number of heads": all(type(heads) is int and heads > 0 for heads in self.heads),
            "variable": all(re.fullmatch(r"[A-Z][A-Z0-9_]+", name) for name in self.environment),
        }
        if wrong := [name for name, right in said.items() if not right]:
            raise ValueError(f"known_bad.json: {self.thread!r} has a bad {', '.join(wrong)}")

    @property
    def about(self) -> str:
        """The component at fault."""
        return next(iter(self.releases))

    @property
    def is_fixed(self) -> bool:
        """True if a release is known to be good again."""
        return self.releases[self.about].before < _ENDLESS

    @property
    def fix(self) -> str:
        """The way to avoid it."""
        other = f"use {self.about} {self.releases[self.about].before} or later" if self.is_fixed else ""
        return "; or ".join(filter(None, (other, self.remedy))) or f"read the thread: {self.end}"

    def sentence(self, needs: tuple[str, ...]) -> str:
        """Says what will happen, when, and who saw it. needs: the conditions that are not known, in words"""
        when = f" with {', '.join(needs)}" if needs else ""
        where = f"{self.thread} says of {self.about} {self.releases[self.about]}"
        return f'this will fail later ({self.effect}){when}, because {where}: "{self.symptom}"'

    def conditions(self, facts: Facts) -> Iterator[tuple[str, bool | None]]:
        """Yields each condition in words, those on releases first, and whether it holds; None if that is not known."""
        for component, span in self.releases.items():
            yield f"{component} {span}", _holds(span, facts.releases.get(component, UNKNOWN))
        yield f"a {' or '.join(self.archs)}", None if facts.archs is None else bool(facts.archs & set(self.archs))
        if self.models:
            yield " or ".join(self.models), None if facts.model is None else facts.model in self.models
        if self.heads:
            some = f"{' or '.join(map(str, self.heads))} query heads a rank"
            yield some, None if facts.heads is None else bool(facts.heads & set(self.heads))
        for feature in self.features:
            yield FEATURES[feature], facts.features.get(feature)
        for name, value in self.environment.items():
            excluded, is_there = value.removeprefix("not "), None
            if facts.environment is not None:
                is_there = (facts.environment.get(name) == excluded) == (excluded == value)
            yield f"{name}={value}", is_there


def matching(facts: Facts) -> tuple[tuple[KnownBad, tuple[str, ...]], ...]:
    """The rows whose conditions hold or may hold, at least that on one release for certain, and what else they need."""
    found = []
    for row in known_bad():
        conditions = tuple(row.conditions(facts))
        holds = [holds for _, holds in conditions]
        if True in holds[: len(row.releases)] and False not in holds:
            found.append((row, tuple(words for words, holds in conditions if holds is None)))
    return tuple(found)


@cache
def known_bad() -> tuple[KnownBad, ...]:
    """Every row, in the order of the file. Raises ValueError or TypeError if one is damaged."""
    return tuple(map(row_of, _CONTENT["rows"]))


def row_of(content: Mapping[str, Any]) -> KnownBad:
    """A row of the file. Raises ValueError for wrong values, TypeError for fields that are missing or unknown."""
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
    spans = {component: _range(*bounds) for component, bounds in content.get("releases", {}).items()}
    return KnownBad(**given | ({"releases": spans} if "releases" in content else {}))


def _range(*bounds: str) -> ReleaseRange:
    """The range of two bounds; an empty one is no bound."""
    given = {name: Release.of(text) for name, text in zip(("since", "before"), bounds, strict=True) if text}
    if any(len(release.numbers) < 4 for release in given.values()):
        raise ValueError(f"known_bad.json: bounds are {bounds}; give at least three numbers, as in 0.26.0")
    return ReleaseRange(**given)


def _holds(span: ReleaseRange, release: Release | None) -> bool | None:
    if release is None or release == UNKNOWN:
        return None if release else False
    if len(release.numbers) > 3:
        return release in span
    # The patch of "7.2" is not known.
    first, last = (Release((*release.numbers[:2], patch, 0)) in span for patch in (0, 1 << 20))
    return first if first == last else None
