"""The table of known-bad releases: faults that others reported in public, and whether they apply here.

known_bad.json has the rows. docs/known_bad.md shows them. Nothing here imports torch, as `rocm-attn doctor` uses it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

from rocm_attn.machine.releases import UNKNOWN, Release, ReleaseRange

PLACE = Path(__file__).with_suffix(".json")

ENGINES = ("vllm", "sglang", "atom")
COMPONENTS = (*ENGINES, "aiter", "rocm", "triton")
ARCHS = ("gfx942", "gfx950")
EFFECTS = ("wrong output", "crash", "hang", "no start", "slow")
# What a model or a command line may ask for, and how a sentence names it.
FEATURES = {
    "latent": "latent attention (MLA)",
    "sparse": "sparse attention with an indexer",
    "window": "sliding windows",
    "wide_heads": "heads wider than 256",
    "fp8_kv": "an FP8 KV cache",
    "drafts": "speculative decoding",
    "prefix_cache": "prefix caching",
    "graphs": "captured graphs",
    "ranks": "tensor parallelism",
    "experts_parallel": "expert parallelism",
    "dp_attention": "DP attention",
    "page_size": "pages of more than one token",
    "large_pool": "a KV pool past 2 GiB a layer",
    "long_context": "long contexts",
    "image_spans": "image tokens",
    "state_layers": "recurrent layers (GDN, KDA, Mamba)",
    "disaggregated": "prefill and decode on different servers",
    "aiter_attention": "AITER as the attention backend",
}
_THREAD = re.compile(r"[\w.-]+/[\w.-]+#\d+")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]+")


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of an installation and of what it will serve; what is missing is not known.

    releases:    component -> release; None: it is not installed
    archs:       of the GPUs
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
    models:      classes that a config.json names; none: any
    features:    keys of FEATURES that are all needed
    heads:       query heads on a rank, one of which is needed; none: any
    environment: variables and the values that are needed
    unless:      variables and the values that avoid it
    seen:        the versions that the thread names
    end:         how the last bad release is known, or why it is not
    effect:      one of EFFECTS
    symptom:     a line of the thread
    remedy:      how to avoid it; empty if nothing is known but another release
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
    unless: Mapping[str, str] = field(default_factory=dict)
    remedy: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for a row that says nothing, or names what is not known here."""
        said = {"thread": bool(_THREAD.fullmatch(self.thread)), "effect": self.effect in EFFECTS}
        said |= {name: bool(getattr(self, name).strip()) for name in ("seen", "end", "symptom")}
        said["symptom"] &= "\n" not in self.symptom
        for name, allowed in (("releases", COMPONENTS), ("archs", ARCHS)):
            said[name] = bool(getattr(self, name)) and set(getattr(self, name)) <= set(allowed)
        said["features"] = set(self.features) <= set(FEATURES)
        said["heads"] = all(type(heads) is int and heads > 0 for heads in self.heads)
        said["environment"] = all(map(_VARIABLE.fullmatch, (*self.environment, *self.unless)))
        said["releases"] &= all(span.since < span.before for span in self.releases.values())
        if wrong := [name for name, right in said.items() if not right]:
            raise ValueError(f"known_bad.json: {self.thread!r} has a bad {', '.join(wrong)}")

    @property
    def about(self) -> str:
        """The component at fault."""
        return next(iter(self.releases))

    @property
    def is_fixed(self) -> bool:
        """True if a release is known to be good again."""
        return self.releases[self.about].before < ReleaseRange().before

    def conditions(self, facts: Facts) -> Iterator[tuple[str, bool | None]]:
        """Yields each condition in words, and whether it holds; None if that is not known."""
        for component, span in self.releases.items():
            yield f"{component} {span}", _holds(span, facts.releases, component)
        yield f"a {' or '.join(self.archs)}", None if facts.archs is None else bool(facts.archs & set(self.archs))
        if self.models:
            yield " or ".join(self.models), None if facts.model is None else facts.model in self.models
        if self.heads:
            some = f"{' or '.join(map(str, self.heads))} query heads a rank"
            yield some, None if facts.heads is None else bool(facts.heads & set(self.heads))
        for feature in self.features:
            yield FEATURES[feature], facts.features.get(feature)
        there = facts.environment
        for name, value in self.environment.items():
            yield f"{name}={value}", None if there is None else there.get(name) == value
        for name, value in self.unless.items():
            yield f"{name} other than {value}", None if there is None else there.get(name) != value


@dataclass(frozen=True, slots=True)
class Match:
    """A row that applies, if the conditions hold that are not known. needs: those conditions, in words."""

    row: KnownBad
    needs: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """What will happen, when, and who saw it."""
        when = f" with {', '.join(self.needs)}" if self.needs else ""
        span = self.row.releases[self.row.about]
        where = f"{self.row.thread} says of {self.row.about} {span}"
        return f'this will fail later ({self.row.effect}){when}, because {where}: "{self.row.symptom}"'

    @property
    def remedy(self) -> str:
        """What to do."""
        about = self.row.about
        other = f"use {about} {self.row.releases[about].before} or later" if self.row.is_fixed else ""
        return "; or ".join(filter(None, (other, self.row.remedy))) or f"read the thread: {self.row.end}"


def matching(facts: Facts) -> tuple[Match, ...]:
    """The rows whose conditions hold or may hold, at least that on one release for certain."""
    found = []
    for row in known_bad():
        conditions = tuple(row.conditions(facts))
        of_releases = [holds for _, holds in conditions[: len(row.releases)]]
        if True in of_releases and False not in (holds for _, holds in conditions):
            found.append(Match(row, tuple(words for words, holds in conditions if holds is None)))
    return tuple(found)


@cache
def known_bad() -> tuple[KnownBad, ...]:
    """Every row, in the order of the file. Raises ValueError or TypeError if one is damaged."""
    return tuple(row_of(each) for each in json.loads(PLACE.read_bytes()))


def row_of(content: Mapping[str, object]) -> KnownBad:
    """A row of the file. Raises ValueError for what no row has, TypeError for what is missing."""
    if unknown := set(content) - {each.name for each in fields(KnownBad)}:
        raise ValueError(
            f"known_bad.json: {content.get('thread')!r} has {', '.join(sorted(unknown))}, which no row has"
        )
    given: dict[str, object] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
    }
    spans = content.get("releases")
    if isinstance(spans, Mapping):
        given["releases"] = {component: _range(*bounds) for component, bounds in spans.items()}
    return KnownBad(**given)  # type: ignore[arg-type]  # a damaged row raises


def _range(since: str, before: str) -> ReleaseRange:
    every = ReleaseRange()
    return ReleaseRange(_bound(since) if since else every.since, _bound(before) if before else every.before)


def _bound(text: str) -> Release:
    release = Release.of(text)
    if len(release.numbers) < 4:
        raise ValueError(f"known_bad.json: a bound is {text!r}; give at least three numbers, as in 0.26.0")
    return release


def _holds(span: ReleaseRange, releases: Mapping[str, Release | None], component: str) -> bool | None:
    release = releases.get(component, UNKNOWN)
    if release is None:
        return False
    if release == UNKNOWN:
        return None
    if len(release.numbers) > 3:
        return release in span
    # The patch of "7.2" is not known.
    first, last = (Release((*release.numbers[:2], patch, 0)) in span for patch in (0, 1 << 20))
    return first if first == last else None
