"""Metrics: what steps have come to so far, in numbers.

A metric is one field of Metrics. The object that sees an event counts it there; snapshots, their text, their JSON and
the reports of the engine and the command line follow from the field.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields
from typing import Any, NoReturn


def _metric(words: str, start: int | float | str = 0) -> Any:
    """A field that counts from `start`. words: its text, with the value in the place of {}."""
    return field(default=start, metadata={"words": words})


@dataclass(slots=True)
class Metrics:
    """Counts since a runner was built, and what is so at the moment of a snapshot.

    One runner owns it; what serves through that runner (engine, scheduler, sampled check) counts in the same object.

    steps:             steps that were run
    replays:           of them, run as a graph
    fallbacks:         of them, run without a graph although steps of their kind and size may have one
    captures:          graphs made
    capture_seconds:   spent making and checking them
    real_seqs:         sequences over all steps
    padded_seqs:       padded sequences that came on top of them
    faults:            faults that the device has reported
    preemptions:       sequences that gave their pages back and were computed again
    aborts:            requests that were ended by Engine.abort()
    prefix_lookups:    tokens of sequences that were looked up in the prefix cache when they were admitted
    prefix_hits:       of them, tokens whose K and V were there and were not computed again
    prompt_tokens:     of all requests that were taken
    new_tokens:        generated
    seconds:           spent in steps, capture_seconds included
    samples:           steps that the sampled check looked at
    rows_differ:       of them, those whose rows differ from the eager run's
    attention_differs: of them, those whose attention in the sampled layer differs from the oracle's
    reserved_written:  of them, those after which row 0 of the table or page 0 of the sampled layer was not zero
    finding:           the last of these findings in words; empty while there was none
    pages_in_use:      at the moment: pages that request rows or the prefix cache hold, without the reserved one
    swa_pages_in_use:  likewise, of the pool of layers with a window
    cached_pages:      at the moment: of pages_in_use, those that only the prefix cache holds, and gives back when pages
                       run out
    graphs_off:        at the moment: why graphs are switched off; empty while they are on or were never asked for
    """

    steps: int = _metric("{} steps")
    replays: int = _metric("{} replayed")
    fallbacks: int = _metric("{} of a captured size without a graph")
    captures: int = _metric("{} graphs made")
    capture_seconds: float = _metric("{:.1f} s making graphs", 0.0)
    real_seqs: int = _metric("{} sequences in all steps")
    padded_seqs: int = _metric("{} padded sequences beside them")
    faults: int = _metric("{} device faults")
    preemptions: int = _metric("{} preemptions")
    aborts: int = _metric("{} aborts")
    prefix_lookups: int = _metric("{} tokens looked up in the prefix cache")
    prefix_hits: int = _metric("{} tokens found there")
    prompt_tokens: int = _metric("{} prompt tokens")
    new_tokens: int = _metric("{} new tokens")
    seconds: float = _metric("{:.1f} s in steps", 0.0)
    samples: int = _metric("{} steps sampled")
    rows_differ: int = _metric("{} DIFFER FROM THE EAGER RUN")
    attention_differs: int = _metric("{} DIFFER FROM THE ORACLE")
    reserved_written: int = _metric("{} FOUND WHAT IS RESERVED WRITTEN")
    finding: str = _metric("last finding: {}", "")
    pages_in_use: int = _metric("{} pages in use")
    cached_pages: int = _metric("{} of them held by the prefix cache alone")
    swa_pages_in_use: int = _metric("{} pages for layers with a window in use")
    graphs_off: str = _metric("graphs off: {}", "")

    @property
    def padded_share(self) -> float:
        """Padded sequences among all sequences of all steps."""
        seqs = self.real_seqs + self.padded_seqs
        return self.padded_seqs / seqs if seqs else 0.0

    @property
    def tokens_per_s(self) -> float:
        """New tokens in a second of steps, making graphs not counted."""
        stepping = self.seconds - self.capture_seconds
        return self.new_tokens / stepping if stepping > 0 else 0.0

    def snapshot(self, **now: int | str) -> Metrics:
        """A copy that never changes. now: the metrics that are read at this moment, by name"""
        return _Snapshot.of({**asdict(self), **now})

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "padded_share": self.padded_share, "tokens_per_s": self.tokens_per_s}

    def __str__(self) -> str:
        """Every metric that is not zero or empty, in words."""
        values = ((each.metadata["words"], getattr(self, each.name)) for each in fields(self))
        parts = [words.format(value) for words, value in values if value]
        if self.tokens_per_s:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        return ", ".join(parts)


class _Snapshot(Metrics):
    """Metrics that do not change."""

    __slots__ = ()

    @classmethod
    def of(cls, values: dict[str, Any]) -> _Snapshot:
        """A snapshot of these values. Raises AttributeError for a name that no metric has."""
        made = cls.__new__(cls)
        for name, value in values.items():
            object.__setattr__(made, name, value)
        return made

    def __reduce__(self) -> tuple[object, ...]:
        return _Snapshot.of, (asdict(self),)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(f"{name} of a snapshot cannot be set; the runner that it was taken of counts on")
