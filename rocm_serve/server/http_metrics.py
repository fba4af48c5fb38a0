"""The server's counts for HTTP, in addition to the engine's Metrics, and Linux's figures for its process."""

import os
import resource
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rocm_attn.step.metrics import Durations, heading, histogram, sample, text_of

_PROC = Path("/proc/self")
# The statuses that alerts use.
_ALARMING = ("429", "500", "503")
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


def _value(name: str, help: str) -> Any:
    """A field that is a metric without labels, and begins with 0. name: in Prometheus, after the prefix"""
    return field(default=0, metadata={"name": name, "help": help})


@dataclass(slots=True)
class HttpMetrics:
    """Counts since the server was started, and some present values. The event loop's thread owns them.

    refused: requests that were refused before the engine saw them, by reason: a few fixed ones, such as "queue"
    constraint_seconds: time that requests have waited for their constraints to be tried
    build:   label -> value: the versions that serve, and the model's name
    """

    open: int = _value("http_open_requests", "requests whose answer has not ended")
    disconnects: int = _value(
        "http_disconnects_total", "requests whose client disconnected before the end of the answer"
    )
    late_readers: int = _value("http_late_readers_total", "requests aborted because their client did not read")
    waiting_bytes: int = _value("http_waiting_bytes", "bytes of bodies that are read, or wait for the engine")
    max_requests: int = _value("http_max_requests", "most prompts that may run or wait; --max-requests")
    failing: bool = _value("failing", "1 while /health answers 503")
    draining: bool = _value("draining", "1 while the server is shutting down and accepts no more requests")
    age_seconds: float = _value(
        "metrics_age_seconds", "age of the engine's counts, which are late while a step takes long"
    )
    refused: Counter[str] = field(default_factory=Counter)
    constraint_seconds: Durations = field(default_factory=Durations)
    build: Mapping[str, str] = field(default_factory=dict)
    _answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    _seconds: dict[str, Durations] = field(default_factory=dict)
    _requests_of_key: Counter[str] = field(default_factory=Counter)
    _tokens_of_key: Counter[tuple[str, str]] = field(default_factory=Counter)

    def note(self, route: str, status: int, seconds: float) -> None:
        """Counts an answer that has ended, the last byte of a stream included.

        route:   the template of its path, such as "/v1/models/{model}"; "other" if the server has none, so that
                 clients cannot make up names
        status:  HTTP status
        seconds: since the request's first byte
        """
        if route not in self._seconds:
            # A rate needs two values of a series. Without these zeros, the first error would not be seen.
            self._answers.update({(route, alarming): 0 for alarming in _ALARMING})
        self._answers[route, str(status)] += 1
        self._seconds.setdefault(route, Durations()).note(seconds)

    def know_keys(self, names: Iterable[str]) -> None:
        """Gives each key its series: a rate needs two values, so the first request would not be seen."""
        for key in names:
            self._requests_of_key[key] += 0
            self._tokens_of_key.update({(key, kind): 0 for kind in ("prompt", "cached", "completion")})

    def note_key(self, key: str, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        """Counts a request for text that has ended. key: its key's name, one of a fixed set"""
        self._requests_of_key[key] += 1
        self._tokens_of_key[key, "prompt"] += prompt_tokens
        self._tokens_of_key[key, "cached"] += cached_tokens
        self._tokens_of_key[key, "completion"] += completion_tokens

    def as_prometheus(self) -> str:
        """Returns Prometheus' text format, to follow Metrics.as_prometheus()."""
        prefix = "rocm_attn"
        lines = self._answers_as_lines(f"{prefix}_http")
        for each in fields(self):
            if each.metadata:
                value = round(+getattr(self, each.name), 3)  # + makes a number of a bool
                lines += _one(f"{prefix}_{each.metadata['name']}", each.metadata["help"], value)
        name = f"{prefix}_http_refused_total"
        lines += heading(name, "requests refused before they reached the engine, by reason", "counter")
        lines += [sample(name, count, reason=reason) for reason, count in sorted(self.refused.items())]
        lines += self._keys_as_lines(f"{prefix}_http")
        name = f"{prefix}_http_constraint_seconds"
        lines += heading(name, "time that a request waited for its constraint to be tried", "histogram")
        lines += histogram(name, self.constraint_seconds)
        name, help = f"{prefix}_build_info", "1, with the versions that serve and the name of the model"
        lines += [*heading(name, help, "gauge"), sample(name, 1, **self.build)]
        return text_of([*lines, *_process()])

    def _keys_as_lines(self, prefix: str) -> list[str]:
        name = f"{prefix}_key_requests_total"
        lines = heading(name, "requests for text that have ended, by the name of their API key", "counter")
        lines += [sample(name, count, key=key) for key, count in sorted(self._requests_of_key.items())]
        name = f"{prefix}_key_tokens_total"
        lines += heading(name, "their tokens: of prompts, of these found in the prefix cache, and new ones", "counter")
        lines += [sample(name, count, key=key, kind=kind) for (key, kind), count in sorted(self._tokens_of_key.items())]
        return lines

    def _answers_as_lines(self, prefix: str) -> list[str]:
        name = f"{prefix}_requests_total"
        lines = heading(name, "answers that have ended, by route and HTTP status", "counter")
        lines += [
            sample(name, count, route=route, status=status) for (route, status), count in sorted(self._answers.items())
        ]
        name = f"{prefix}_request_seconds"
        lines += heading(name, "time from a request's first byte to the last byte of its answer, by route", "histogram")
        for route, seconds in sorted(self._seconds.items()):
            lines += histogram(name, seconds, route=route)
        return lines


def _one(name: str, help: str, value: float) -> list[str]:
    """Returns the lines of a metric without labels: a counter if its name says total, else a gauge."""
    return [*heading(name, help, "counter" if name.endswith("_total") else "gauge"), sample(name, value)]


def _process() -> list[str]:
    """Returns the metrics of a process under the names of Prometheus' own libraries; none outside of Linux."""
    if not _PROC.joinpath("stat").exists():
        return []
    # The name is in brackets and may hold any character. The first field after it is the third of proc(5).
    stat = _PROC.joinpath("stat").read_text().rpartition(")")[2].split()
    booted = float(Path("/proc/stat").read_text().partition("btime ")[2].split()[0])
    values = (
        ("process_cpu_seconds_total", "CPU time of the process, in seconds", (int(stat[11]) + int(stat[12])) / _TICKS),
        ("process_resident_memory_bytes", "resident memory of the process", int(stat[21]) * _PAGE),
        ("process_virtual_memory_bytes", "address space of the process", int(stat[20])),
        ("process_start_time_seconds", "start of the process, in Unix time", booted + int(stat[19]) / _TICKS),
        ("process_open_fds", "open files and connections", len(os.listdir(_PROC / "fd"))),
        ("process_max_fds", "limit of open files and connections", resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    )
    return [line for name, help, value in values for line in _one(name, help, value)]
