"""Result files: the measurements with every sample, the machine, and the settings."""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rocm_attn.cli.streams import json_text
from rocm_attn.errors import BadSetting
from rocm_attn.machine.target import detect_target
from rocm_attn.machine.whole_files import whole_file
from rocm_lab.bench.ceilings import Ceilings
from rocm_lab.bench.choices import HOST
from rocm_lab.bench.kernels import OK, ContestantResult, KernelOptions
from rocm_lab.bench.machine import describe_machine

# Raised by one if a reader of the older form would misread the newer one.
SCHEMA = "rocm_attn.bench/1"
KERNELS, SERVING = "kernels", "serving"
# A machine's words that pictures show.
_IN_PICTURES = ("device", "commit", "torch", "triton")
# Longer than any measurement.
_MOST_US = 1e15
# Words of a command line that have a / and are not paths: heads as 32/8, and encodings as e4m3fn/token.
_CODE = "[a-z0-9-]+(/(layer|head|token))?"
_NO_PATH = re.compile(rf"\d+/\d+|{_CODE}(,{_CODE})*")


@dataclass(frozen=True, slots=True)
class ResultFile:
    """A result file that was read.

    kind:    KERNELS or SERVING
    machine: device, versions, commit, date
    rows:    as they were written
    rest:    everything else
    """

    kind: str
    machine: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    rest: Mapping[str, Any]


def kernels_as_json(
    rows: Sequence[ContestantResult], device: torch.device, ceilings: Ceilings, options: KernelOptions, energy: str
) -> dict[str, Any]:
    """Returns the content of a file of kernels. energy: the counter, or why there is none"""
    target = detect_target(device)
    return {
        **head(KERNELS, device),
        "arch": target.arch,
        "compute_units": target.compute_units,
        "ceilings": {**asdict(ceilings), "bytes_per_s": ceilings.bytes_per_s},
        "options": asdict(options),
        "energy": energy,
        "rows": [row.as_json() for row in rows],
    }


def head(kind: str, device: torch.device) -> dict[str, Any]:
    """Returns the beginning of every result file."""
    machine: dict[str, Any] = describe_machine()
    if device.type != "cuda":
        machine["device"] = f"CPU, {machine['threads']} threads"
    machine["runtime"] = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return {"schema": SCHEMA, "kind": kind, "command": ["rocm-attn", *map(shareable, sys.argv[1:])], "machine": machine}


def shareable(word: str) -> str:
    """Returns a word of a command line with file names instead of paths, because result files are shown to others."""
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    if "://" in value:
        scheme, _, rest = value.partition("://")
        return f"{flag}{equals}{scheme}://{rest.rpartition('@')[2]}"  # without user and password
    if os.sep not in value or _NO_PATH.fullmatch(value):
        return word
    return f"{flag}{equals}{'@' if value.startswith('@') else ''}{Path(value).name}"


def read_result(path: Path) -> ResultFile:
    """Reads a result file. Raises BadSetting if it is missing or damaged, or is no result file of this schema."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise BadSetting(f"{path} cannot be read ({error.strerror}); give a file that rocm-attn bench wrote") from error
    except (ValueError, RecursionError) as error:
        raise BadSetting(f"{path} is not JSON ({error}); give a file that rocm-attn bench wrote") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise BadSetting(f"{path} has the schema {schema!r}, and this release reads {SCHEMA!r}; measure again")
    if not _is_whole(found):
        raise BadSetting(f"{path} is damaged: it lacks what rocm-attn bench writes; measure again")
    rest = {name: value for name, value in found.items() if name not in ("kind", "machine", "rows")}
    return ResultFile(str(found.get("kind")), found["machine"], found["rows"], rest)


def _is_whole(found: Mapping[str, Any]) -> bool:
    """True if a result has its parts, and what comparisons and pictures read."""
    kind, machine, rows = found.get("kind"), found.get("machine"), found.get("rows")
    if not isinstance(machine, dict) or not isinstance(rows, list):
        return False
    if kind not in (KERNELS, SERVING):
        return True  # it is refused by its kind
    is_whole = _is_of_kernels if kind == KERNELS else _is_of_a_server
    return all(isinstance(machine.get(name), str) for name in _IN_PICTURES) and all(
        isinstance(row, dict) and is_whole(row) for row in rows
    )


def _is_of_kernels(row: Mapping[str, Any]) -> bool:
    """True if a row has its words and its times. Times of the host have no lower bound."""
    if not all(isinstance(row.get(name), str) for name in ("suite", "case", "batch", "provider", "status")):
        return False
    samples = row.get("samples_us", [])
    times: list[Any] = [row.get("us")] * (row["status"] == OK) + [row.get("lower_bound_us")] * (row["suite"] != HOST)
    return isinstance(samples, list) and all(
        type(time) in (int, float) and 0 < time < _MOST_US for time in (*samples, *times)
    )


def _is_of_a_server(row: Mapping[str, Any]) -> bool:
    """True if a row has what pictures show of a server. A time that was not measured is null."""
    quantiles: list[Any] = [row.get(name) for name in ("first_token", "token_gap")]
    if not isinstance(row.get("target"), str) or not all(isinstance(each, dict) for each in quantiles):
        return False
    times = [each.get(name, "") for each in quantiles for name in ("p50_ms", "p99_ms")]
    numbers = [row.get("output_tokens"), row.get("output_tokens_per_s"), *(time for time in times if time is not None)]
    return all(type(number) in (int, float) and 0 <= number < _MOST_US for number in numbers)


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Writes a result as JSON, whole or not at all. Raises BadSetting if the file cannot be written."""
    try:
        with whole_file(path) as part:
            part.write_text(json_text(result) + "\n")
    except OSError as error:
        raise BadSetting(f"{path} cannot be written ({error.strerror}); choose another file") from error


def deliver(result: Mapping[str, Any], out: str | None, *, in_json: bool) -> None:
    """Writes a result to the file `out`, if there is one, and prints it if `in_json`.

    Raises BadSetting if the file cannot be written. The result is printed then in any case: samples are taken once.
    """
    if out:
        try:
            write_json(Path(out), result)
        except BadSetting:
            print(json_text(result))
            raise
    if in_json:
        print(json_text(result))


def lines_of(rows: Sequence[ContestantResult]) -> list[str]:
    """Returns the rows of one case as lines of text. Wrong ones get no time."""
    first = rows[0]
    bound = f"lower bound {first.lower_bound_us:.1f} us"
    lines = [f"{first.case.name} ({bound})"]
    for row in rows:
        if row.status == OK:
            spread = f"{min(row.samples.us):.1f} to {max(row.samples.us):.1f}"
            energy = "" if row.joules_a_token != row.joules_a_token else f", {row.joules_a_token * 1e6:.3g} uJ a token"
            lines.append(
                f"  {row.provider:<22} {row.us:>10.1f} us ({spread})  {row.share:>6.1%} of the "
                f"lower bound's speed{energy}"
            )
        else:
            lines.append(f"  {row.provider:<22} {row.status.upper()}: {row.reason}")
    return lines
