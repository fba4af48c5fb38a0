"""Traces of requests: the arrival of each, its tokens, and the tokens that it asks for.

A file has a line per request, in one of these schemas. The names in it identify the schema:

own       JSON lines   arrival_s, prompt_tokens, output_tokens, and optionally prefix, a list of block ids
Mooncake  JSON lines   timestamp (ms), input_length, output_length, and optionally hash_ids, of blocks of 512 tokens
Azure     CSV          TIMESTAMP (a date and time), ContextTokens, GeneratedTokens
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rocm_attn.errors import BadSetting
from rocm_lab.bench.batch_spec import BatchSpec

PREFIX_BLOCK = 512
_NUMBERED = re.compile(r"(.+):([1-9][0-9]{0,5})")
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request.

    arrival_s:     seconds since the trace began
    prompt_tokens: at least 1
    output_tokens: at least 1
    prefix:        ids of the prompt's blocks of PREFIX_BLOCK tokens; requests share blocks with equal ids

    Raises BadSetting.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.arrival_s) and self.arrival_s >= 0):
            raise BadSetting(f"it arrives at {self.arrival_s} s; that must be a number of at least 0")
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise BadSetting(f"{name} is {getattr(self, name)}; it must be at least 1")

    def line(self) -> str:
        """Returns a line of the own schema."""
        found: dict[str, Any] = {
            "arrival_s": self.arrival_s,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
        }
        return json.dumps(found | ({"prefix": list(self.prefix)} if self.prefix else {})) + "\n"


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Requests in the order in which they arrive."""

    requests: tuple[TracedRequest, ...]

    def __post_init__(self) -> None:
        if not self.requests:
            raise BadSetting("the trace has no requests; give at least one")

    @classmethod
    def of(cls, requests: Iterator[TracedRequest]) -> RequestTrace:
        """Makes a trace in order of arrival, the first at 0."""
        ordered = sorted(requests, key=lambda request: request.arrival_s)
        first = ordered[0].arrival_s if ordered else 0.0
        return cls(tuple(replace(each, arrival_s=each.arrival_s - first) for each in ordered))

    def first(self, count: int) -> RequestTrace:
        """Returns a trace of only the first requests."""
        return RequestTrace(self.requests[:count])

    def faster(self, times: float) -> RequestTrace:
        """Returns the same requests in a `times`th of the time; infinity: all at once."""
        return RequestTrace(tuple(replace(each, arrival_s=each.arrival_s / times) for each in self.requests))

    def text(self) -> str:
        """Returns the text of a file of the own schema."""
        return "".join(request.line() for request in self.requests)


def read_trace(path: Path) -> RequestTrace:
    """Reads a trace of any of the schemas. Raises BadSetting, which names the file and the line."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"{path} cannot be read ({error}); give a file of requests (docs/bench.md)") from error
    try:
        lines = text.split("\n")  # str.splitlines() would also end a line within a text of JSON, at U+2028 and the like
        is_csv = bool(text.strip()) and not text.lstrip().startswith("{")
        return RequestTrace.of(_from_csv(lines) if is_csv else _from_json_lines(lines))
    except (BadSetting, csv.Error) as error:
        raise BadSetting(f"{path}: {error}") from error


def read_step(given: str) -> BatchSpec:
    """Returns a step in which a trace's requests decode, each halfway through its answer. Raises BadSetting.

    given: FILE, or FILE:N for the first N requests, in the order in which they arrive
    """
    numbered = None if Path(given).exists() else _NUMBERED.fullmatch(given)
    path, count = (Path(given), None) if numbered is None else (Path(numbered[1]), int(numbered[2]))
    requests = read_trace(path).requests[:count]
    return BatchSpec.of_lengths((1, each.prompt_tokens + (each.output_tokens - 1) // 2) for each in requests)


def _from_json_lines(lines: Sequence[str]) -> Iterator[TracedRequest]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (RecursionError, ValueError) as error:
            raise BadSetting(f"line {number} is not JSON ({error})") from error
        if not isinstance(found, dict):
            raise BadSetting(f"line {number} is {type(found).__name__}, not an object")
        reader = next((read for names, read in _JSON_SCHEMAS.items() if set(names) <= found.keys()), None)
        if reader is None:
            forms = ", or ".join(" ".join(names) for names in _JSON_SCHEMAS)
            raise BadSetting(f"line {number} has {' '.join(found) or 'nothing'}; it must have {forms}")
        yield _checked(number, reader, found)


def _own(found: Mapping[str, Any]) -> TracedRequest:
    prefix = tuple(map(_whole, found.get("prefix", ())))
    return TracedRequest(
        float(found["arrival_s"]), _whole(found["prompt_tokens"]), _whole(found["output_tokens"]), prefix
    )


def _mooncake(found: Mapping[str, Any]) -> TracedRequest:
    blocks = tuple(map(_whole, found.get("hash_ids", ())))
    return TracedRequest(
        float(found["timestamp"]) / 1e3, _whole(found["input_length"]), _whole(found["output_length"]), blocks
    )


_JSON_SCHEMAS: Mapping[tuple[str, ...], Callable[[Mapping[str, Any]], TracedRequest]] = {
    ("arrival_s", "prompt_tokens", "output_tokens"): _own,
    ("timestamp", "input_length", "output_length"): _mooncake,
}


def _from_csv(lines: Sequence[str]) -> Iterator[TracedRequest]:
    reader = csv.DictReader(lines)
    if not set(AZURE) <= set(reader.fieldnames or ()):
        raise BadSetting(
            f"line 1 is {','.join(reader.fieldnames or ())!r}; a CSV trace must begin with {','.join(AZURE)}"
        )
    begin: datetime | None = None
    for row in reader:
        at = _checked_time(reader.line_num, row["TIMESTAMP"])
        begin = begin or at
        seconds = (at - begin).total_seconds()

        def read(found: Mapping[str, Any], seconds: float = seconds) -> TracedRequest:
            # The first line may not be the earliest. RequestTrace.of sets the earliest one to 0.
            prompt_tokens, output_tokens = _counted(found, "ContextTokens"), _counted(found, "GeneratedTokens")
            return TracedRequest(seconds + _DAY_S, prompt_tokens, output_tokens)

        yield _checked(reader.line_num, read, row)


_DAY_S = 86400.0
# Seven digits after the second or none, and in some files a time zone.
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)?", re.ASCII)


def _checked_time(line: int, text: str | None) -> datetime:
    """Reads one of Azure's times. Without a zone it counts as of UTC. Raises BadSetting."""
    found = _TIME.fullmatch((text or "").strip())
    try:
        if found is None:
            raise ValueError("it has another form")
        second, digits, zone = found.groups()
        zone = "+00:00" if zone in (None, "Z") else zone
        return datetime.fromisoformat(f"{second}.{((digits or '') + '000000')[:6]}{zone}")
    except ValueError as error:
        raise BadSetting(f"line {line} has the TIMESTAMP {text!r}; it must be a date and time") from error


def _checked(line: int, read: Callable[[Mapping[str, Any]], TracedRequest], found: Mapping[str, Any]) -> TracedRequest:
    try:
        return read(found)
    except (BadSetting, OverflowError, TypeError, ValueError) as error:
        raise BadSetting(f"line {line}: {error}") from error


def _counted(found: Mapping[str, Any], name: str) -> int:
    text = str(found[name] or "").strip()
    if not re.fullmatch("[0-9]{1,18}", text):
        raise BadSetting(f"{name} is {found[name]!r}; it must be a whole number")
    return int(text)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadSetting(f"{value!r} is not a whole number")
    return value
