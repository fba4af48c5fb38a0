"""`rocm-attn bench compare`: how a change affected times, if two runs can show it."""

import argparse
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from rocm_attn.cli.streams import json_text
from rocm_attn.errors import RocmAttnError
from rocm_lab.bench.compare import Allowed, Change, compare
from rocm_lab.bench.result_file import read_result

_WORSE = (Change.SLOWER, Change.BROKEN)


class Slower(RocmAttnError):
    """A row is slower than before, or wrong now."""


def run(options: argparse.Namespace) -> None:
    """Prints a line for each row, worst first. Raises Slower, BadSetting."""
    allowed = Allowed(options.other_device, options.common_cases)
    before, after = (read_result(Path(name)) for name in (options.before, options.after))
    found = compare(before, after, options.smallest / 100, allowed)
    found.sort(key=lambda row: (row.change not in _WORSE, -row.ratio))
    counts = Counter(row.change for row in found)
    summary = ", ".join(f"{counts[change]} {change.value}" for change in Change if counts[change])
    if options.json:
        rows = [{**asdict(row), "change": row.change.value} for row in found]
        print(json_text({"smallest": options.smallest / 100, "rows": rows}))
    else:
        print("\n".join(row.line() for row in found if options.every or row.change is not Change.SAME))
        print(f"{len(found)} rows: {summary} (differences below {options.smallest:g}% do not count)")
    worse = sum(counts[change] for change in _WORSE)
    if worse:
        raise Slower(f"{worse} of {len(found)} rows are slower than before, or wrong now")
