"""Ragged batches from files: the lengths of each sequence as JSON or CSV, or a trace of requests.

JSON: a list whose entries are a number (a decode: tokens of the sequence), [new, stored], or {"new": n, "stored": m}.
CSV:  a first line `new,stored`, or `kv_len` for decodes; then a line per sequence.

A trace (request_trace.py) gives a decode of each of its requests, halfway through its answer.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rocm_attn.errors import BadSetting
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.request_trace import AZURE, read_trace

_NUMBERED = re.compile(r"(?P<path>.+):(?P<count>[1-9][0-9]{0,5})")
_FORMS = 'a number (tokens of a decode), [new, stored] or {"new": n, "stored": m}'


def read_batch(given: str) -> BatchSpec:
    """Returns the batch of a file, or of the first requests of a trace.

    given: FILE, or FILE:N for N requests, in the order in which they arrive
    Raises BadSetting.
    """
    numbered = _NUMBERED.fullmatch(given)
    if numbered is None or Path(given).exists():
        return read_trace_step(Path(given)) if _is_trace(Path(given)) else read_lengths(Path(given))
    path, count = Path(numbered["path"]), int(numbered["count"])
    if not _is_trace(path):
        raise BadSetting(
            f"{path} is not a trace of requests, so a number of them cannot be selected; leave out :{count}"
        )
    return read_trace_step(path, count)


def read_trace_step(path: Path, count: int | None = None) -> BatchSpec:
    """Returns a step in which a trace's first requests decode, each halfway through its answer. Raises BadSetting.

    count: the number of requests; None: all
    """
    requests = read_trace(path).requests
    return BatchSpec.of_lengths((1, each.prompt_tokens + (each.output_tokens - 1) // 2) for each in requests[:count])


def _is_trace(path: Path) -> bool:
    if path.suffix != ".csv" or not path.is_file():
        return path.suffix == ".jsonl"
    with path.open(errors="replace") as file:
        return file.readline().startswith(AZURE[0])


def read_lengths(path: Path) -> BatchSpec:
    """Reads the batch of a file, by its suffix. Raises BadSetting, which names the file and the entry or line."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"{path} cannot be read ({error}); give a .json or .csv file of lengths") from error
    if path.suffix not in _READERS:
        raise BadSetting(
            f"{path} ends in {path.suffix!r}; give lengths as {' or '.join(_READERS)}, or a trace as .jsonl"
        )
    try:
        return BatchSpec.of_lengths(_READERS[path.suffix](text))
    except BadSetting as error:
        raise BadSetting(f"{path}: {error}") from error


def _from_json(text: str) -> Iterator[tuple[int, int]]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BadSetting(f"it is not JSON ({error})") from error
    if not isinstance(found, list):
        raise BadSetting(f"it holds {type(found).__name__}; it must be a list with entries that are {_FORMS}")
    for number, entry in enumerate(found):
        yield _lengths(entry, f"entry {number}")


def _lengths(entry: Any, where: str) -> tuple[int, int]:
    if _is_number(entry):
        if entry < 1:
            raise BadSetting(f"{where} is {entry}; a decode has at least 1 token")
        return 1, entry - 1
    pair = (entry.get("new"), entry.get("stored", 0)) if isinstance(entry, Mapping) else entry
    if isinstance(pair, list | tuple) and len(pair) == 2 and all(map(_is_number, pair)):
        new, stored = pair
        if new < 1 or stored < 0:
            raise BadSetting(f"{where} is {entry!r}; new tokens must be at least 1 and stored ones at least 0")
        return new, stored
    raise BadSetting(f"{where} is {entry!r}; it must be {_FORMS}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _from_csv(text: str) -> Iterator[tuple[int, int]]:
    reader = csv.DictReader(text.splitlines())
    names = [name.strip() for name in reader.fieldnames or ()]
    if names not in (["new", "stored"], ["kv_len"]):
        raise BadSetting(f"line 1 is {','.join(names)!r}; it must be 'new,stored', or 'kv_len' for decodes")
    reader.fieldnames = names
    for row in reader:
        where = f"line {reader.line_num}"
        try:
            values = [int(row[name] or "") for name in names]
        except (TypeError, ValueError) as error:
            raise BadSetting(f"{where} is {dict(row)!r}; it must be a whole number in each column") from error
        yield _lengths(values[0] if len(values) == 1 else values, where)


_READERS = {".json": _from_json, ".csv": _from_csv}
