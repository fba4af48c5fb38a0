"""Metrics: counts and durations of steps and requests, with their text in Prometheus' format, version 0.0.4.

Each metric is one field of Metrics, with its help and its kind. The object that sees an event counts it in that field;
snapshots, JSON, Prometheus' text, and the reports of the engine and the command line are all generated from the fields.
"""

# ruff: noqa: RUF009  # what is called in a default makes a field

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import FrozenInstanceError, dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, NoReturn, TypeVar

# Upper bounds in seconds, 1-2-5 from 10 us to 500 s; longer durations are in the last bucket, which has no bound.
BOUNDS = tuple(digit * 10.0**power for power in range(-5, 3) for digit in (1, 2, 5))
# Upper bounds of lengths, in tokens.
LENGTH_BOUNDS = tuple(float(1 << power) for power in range(21))

_Histogram = TypeVar("_Histogram", bound="Durations")


@dataclass(slots=True)
class Durations:
    """A histogram of durations: counts in fixed buckets, and the sum.

    Histograms of several servers, or of one server at several times, can be added and subtracted. note() takes less
    than a microsecond and allocates nothing.

    counts:  durations in each bucket (`bounds` are upper bounds, inclusive), then those above the last bound
    total:   sum, in seconds
    longest: in seconds
    """

    bounds: ClassVar[tuple[float, ...]] = BOUNDS

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0
    longest: float = 0.0

    def note(self, seconds: float, times: int = 1) -> None:
        """Adds a duration, `times` times."""
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.total += seconds * times
        if seconds > self.longest:
            self.longest = seconds

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """The quantile in seconds, for a share of [0, 1]: the upper bound of its bucket, or the longest duration."""
        left = share * self.count
        for bound, count in zip(self.bounds, self.counts, strict=False):
            left -= count
            if left <= 0:
                return min(bound, self.longest)
        return self.longest

    def copy(self: _Histogram) -> _Histogram:
        """An independent copy."""
        return type(self)(list(self.counts), self.total, self.longest)

    def as_dict(self) -> dict[str, float]:
        return {
            "count": self.count,
            "total": self.total,
            "p50": self.quantile(0.5),
            "p99": self.quantile(0.99),
            "longest": self.longest,
        }

    def __bool__(self) -> bool:
        return self.longest > 0

    def __str__(self) -> str:
        """The durations in words."""
        return f"p50 {_span(self.quantile(0.5))}, p99 {_span(self.quantile(0.99))}, longest {_span(self.longest)}"


@dataclass(slots=True)
class Lengths(Durations):
    """Counts of lengths in tokens, like Durations: buckets at the powers of two up to 2^20. A length may be zero."""

    bounds: ClassVar[tuple[float, ...]] = LENGTH_BOUNDS

    counts: list[int] = field(default_factory=lambda: [0] * (len(LENGTH_BOUNDS) + 1))

    def __str__(self) -> str:
        return f"p50 {self.quantile(0.5):g}, p99 {self.quantile(0.99):g}, longest {self.longest:g} tokens"


class Reason(str):
    """A sentence, and the word that stands for it where sentences cannot: in the labels of metrics.

    A label that changes with each sentence would make a series for each of them.
    """

    word: str

    def __new__(cls, sentence: str, word: str) -> Reason:
        made = super().__new__(cls, sentence)
        made.word = word
        return made

    def __reduce__(self) -> tuple[object, ...]:
        return Reason, (str(self), self.word)


NO_REASON = Reason("", "")


def _metric(kind: str, start: Callable[[], object], help: str, words: str, labels: tuple[str, ...] = ()) -> Any:
    """A field that begins with start().

    kind:   Prometheus' type of the metric
    help:   description of the metric
    words:  its text, with {} for the value
    labels: reasons that have a series from the beginning: a rate needs two values, so the first one would not be seen
    """
    return field(default_factory=start, metadata={"help": help, "words": words, "kind": kind, "labels": labels})


# Counters count since a runner was built; reasons are counters by reason; a gauge has its value at the moment of a
# snapshot. A state is a Reason, NO_REASON if there is nothing to report; `labels` are all the words that it may have.
_counter = partial(_metric, "counter", int)
_seconds = partial(_metric, "counter", float)
_reasons = partial(_metric, "counter", dict)
_gauge = partial(_metric, "gauge", int)
_durations = partial(_metric, "histogram", Durations)
_lengths = partial(_metric, "histogram", Lengths)
_state = partial(_metric, "gauge", lambda: NO_REASON)


@dataclass(slots=True)
class Metrics:
    """Counters since a runner was built, and gauges read at a snapshot; each field's help describes it.

    A runner owns it; the engine, scheduler and sampled check above that runner count in the same object.
    """

    steps: int = _counter("steps run", "{} steps")
    replays: int = _counter("steps run as a graph", "{} replayed")
    fallbacks: dict[str, int] = _reasons(
        "steps run without a graph although steps of their kind and size may have one, by reason",
        "{} without a graph that their size may have",
    )
    captures: int = _counter("graphs made", "{} graphs made")
    capture_seconds: float = _seconds("time spent making and checking graphs", "{:.1f} s making graphs")
    compiles_after_start: int = _counter(
        "kernels that Triton compiled after the engine was ready for requests, which have waited for them",
        "{} COMPILED AFTER THE START",
    )
    compile_seconds: float = _seconds(
        "time that the process has waited for kernels of Triton; times of graphs and steps include it",
        "{:.1f} s for compiled kernels",
    )
    real_seqs: int = _counter("sequences, summed over all steps", "{} sequences in all steps")
    padded_seqs: int = _counter("padded sequences, summed over all steps", "{} padded sequences in addition")
    faults: int = _counter("faults reported by the device", "{} device faults")
    preemptions: int = _counter("sequences that gave up their pages and were computed again", "{} preemptions")
    requests: int = _counter("requests accepted", "{} requests")
    requests_ended: dict[str, int] = _reasons(
        'requests that have ended, by finish reason, or "cancelled" if their reader has left',
        "{} ended",
        ("stop", "length", "abort", "error", "cancelled"),
    )
    request_prompt_tokens: Lengths = _lengths("prompt tokens of an accepted request", "a prompt {}")
    request_new_tokens: Lengths = _lengths("new tokens of a request that has ended", "an answer {}")
    aborts: int = _counter("requests aborted", "{} aborts")
    refusals: int = _counter("requests refused because too many were waiting", "{} requests refused")
    prefix_lookups: int = _counter(
        "tokens of admitted sequences looked up in the prefix cache",
        "{} tokens looked up in the prefix cache",
    )
    prefix_hits: int = _counter(
        "tokens found in the prefix cache, whose K and V were not computed again", "{} tokens found there"
    )
    host_kv_hits: int = _counter(
        "pages of the prefix cache that came back from host memory", "{} pages came back from host memory"
    )
    host_kv_refusals: dict[str, int] = _reasons(
        "pages in host memory that were refused and computed again: their bytes have changed, or they are others",
        "{} PAGES REFUSED FROM HOST MEMORY",
        ("changed", "other"),
    )
    verifications: int = _counter(
        "sequences whose draft tokens were verified, summed over all steps", "drafts verified {} times"
    )
    drafts: int = _counter("draft tokens verified", "{} drafts")
    accepted_drafts: int = _counter("draft tokens accepted", "{} of them accepted")
    prompt_tokens: int = _counter("prompt tokens of all accepted requests", "{} prompt tokens")
    new_tokens: int = _counter("tokens generated", "{} new tokens")
    seconds: float = _seconds("time spent in steps, including making graphs", "{:.1f} s in steps")
    step_seconds: Durations = _durations("wall time of a step, from scheduling it to its tokens", "a step {}")
    host_seconds: Durations = _durations(
        "time of the host for scheduling and launching a step; on a CPU this includes computing it", "of it the host {}"
    )
    queue_seconds: Durations = _durations("time from accepting a request to its first step", "in the queue {}")
    first_token_seconds: Durations = _durations("time to first token of a request", "to the first token {}")
    request_seconds: Durations = _durations("time from accepting a request to its end", "to the end {}")
    token_gap_seconds: Durations = _durations("time between tokens of a request", "between tokens {}")
    samples: int = _counter("steps that the sampled check compared", "{} steps sampled")
    rows_differ: int = _counter("sampled steps whose rows differ from the eager run", "{} DIFFER FROM THE EAGER RUN")
    attention_differs: int = _counter(
        "sampled steps whose attention in the sampled layer differs from the reference", "{} DIFFER FROM THE REFERENCE"
    )
    reserved_written: int = _counter(
        "sampled steps after which row 0 of the table or page 0 of the sampled layer was not zero",
        "{} WROTE TO RESERVED MEMORY",
    )
    finding: Reason = _state(
        "1 for the kind of the sampled check's last finding", "last finding: {}", ("rows", "attention", "reserved")
    )
    running: int = _gauge("running requests, whose K and V are in the pool", "{} requests running")
    waiting: int = _gauge("requests that wait for room", "{} waiting")
    usable_pages: int = _gauge("pages of the pool, without the reserved one", "{} pages")
    pages_in_use: int = _gauge("pages held by request rows or by the prefix cache", "{} pages in use")
    cached_pages: int = _gauge(
        "pages held only by the prefix cache, which releases them when pages run out",
        "{} of them held by the prefix cache alone",
    )
    host_kv_bytes: int = _gauge(
        "bytes of pages of the prefix cache that are in host memory", "{} bytes of pages in host memory"
    )
    swa_pages_in_use: int = _gauge(
        "pages in use of the pool of layers with a window", "{} pages for layers with a window in use"
    )
    graphs_off: Reason = _state(
        "1 for the kind of reason why graphs are switched off",
        "graphs off: {}",
        ("differs", "refused", "forward", "check", "unsealed"),
    )

    def note_prompt(self, num_tokens: int) -> None:
        """Notes the prompt of a request that was accepted."""
        self.prompt_tokens += num_tokens
        self.request_prompt_tokens.note(num_tokens)

    def note_end(self, reason: str, seconds: float, num_tokens: int) -> None:
        """Notes that a request has ended. seconds: since it was accepted; num_tokens: generated tokens"""
        self.requests_ended[reason] = self.requests_ended.get(reason, 0) + 1
        self.request_seconds.note(seconds)
        self.request_new_tokens.note(num_tokens)

    @property
    def padded_share(self) -> float:
        """The share of padded sequences among all sequences of all steps."""
        seqs = self.real_seqs + self.padded_seqs
        return self.padded_seqs / seqs if seqs else 0.0

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of step time, without graph capture."""
        stepping = self.seconds - self.capture_seconds
        return self.new_tokens / stepping if stepping > 0 else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per sequence and verify step (accepted drafts and the next token); 0 without such steps."""
        return 1 + self.accepted_drafts / self.verifications if self.verifications else 0.0

    @property
    def tokens_per_step(self) -> float:
        """New tokens per step, over all its sequences, on average."""
        return self.new_tokens / self.steps if self.steps else 0.0

    def snapshot(self, **now: float | Reason) -> Metrics:
        """An independent copy. now: values of gauges, by name"""
        values = self._values()
        owned = {name: value.copy() for name, value in values.items() if isinstance(value, dict | Durations)}
        return _Snapshot.of({**values, **owned, **now})

    def as_dict(self) -> dict[str, object]:
        plain = {
            name: value.as_dict() if isinstance(value, Durations) else value for name, value in self._values().items()
        }
        derived = ("padded_share", "tokens_per_s", "tokens_per_step", "acceptance_length")
        return {**plain, **{name: getattr(self, name) for name in derived}}

    def as_prometheus(self, prefix: str = "rocm_attn") -> str:
        """The metrics in Prometheus' text format, version 0.0.4. prefix: of every name"""
        lines: list[str] = []
        for each in fields(self):
            kind, value = each.metadata["kind"], getattr(self, each.name)
            name = f"{prefix}_{each.name}_total" if kind == "counter" else f"{prefix}_{each.name}"
            lines += heading(name, each.metadata["help"], kind)
            if isinstance(value, Durations):
                lines += histogram(name, value)
            elif isinstance(value, dict):
                counted = {**dict.fromkeys(each.metadata["labels"], 0), **value}
                lines += [sample(name, count, reason=reason) for reason, count in sorted(counted.items())]
            elif isinstance(value, Reason):
                lines += [sample(name, int(value.word == word), reason=word) for word in each.metadata["labels"]]
            else:
                lines.append(sample(name, value))
        return text_of(lines)

    def _values(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def lines(self) -> list[str]:
        """All metrics that are not zero or empty, in words: a line of counts, and a line of durations."""
        counts, times = list[str](), list[str]()
        for each in fields(self):
            value = getattr(self, each.name)
            if value:
                part = each.metadata["words"].format(_in_words(value))
                (times if isinstance(value, Durations) else counts).append(part)
        if self.acceptance_length:
            counts.append(f"acceptance length {self.acceptance_length:.2f}")
            counts.append(f"{self.tokens_per_step:.2f} tokens a step")
        if self.tokens_per_s:
            counts.append(f"{self.tokens_per_s:.1f} tokens/s")
        return [line for line in (", ".join(counts), "; ".join(times)) if line]

    def __str__(self) -> str:
        return "; ".join(self.lines())


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
        return _Snapshot.of, (self._values(),)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(f"{name} of a snapshot cannot be set, because its runner keeps counting")


def _span(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{1e3 * seconds:.4g} ms"


def _in_words(value: object) -> object:
    """A value in the form that the words of its metric take."""
    if isinstance(value, dict):
        return f"{sum(value.values())} ({', '.join(f'{count}: {reason}' for reason, count in value.items())})"
    return value


def heading(name: str, help: str, of_type: str) -> list[str]:
    """The two lines above a metric's samples. of_type: "counter", "gauge" or "histogram"."""
    escaped = help.replace("\\", "\\\\").replace("\n", "\\n")
    return [f"# HELP {name} {escaped}", f"# TYPE {name} {of_type}"]


def sample(name: str, value: float, **labels: str) -> str:
    """The line of one value."""
    in_braces = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{in_braces}}} {value}" if labels else f"{name} {value}"


def histogram(name: str, value: Durations, **labels: str) -> list[str]:
    """Lines of durations: how many did not exceed each bound, their sum in seconds, and their number."""
    lines, below = [], 0
    for bound, count in zip((*value.bounds, float("inf")), value.counts, strict=True):
        below += count
        le = "+Inf" if bound == float("inf") else format(bound, ".10g")
        lines.append(sample(f"{name}_bucket", below, **labels, le=le))
    return [*lines, sample(f"{name}_sum", value.total, **labels), sample(f"{name}_count", below, **labels)]


def text_of(lines: Iterable[str]) -> str:
    """The text of a scrape; texts of several sources may be joined if no metric is in two of them."""
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
