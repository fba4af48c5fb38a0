"""Proves that indices of all kernels fit 32 bits, and writes a document.

    python -m tests.amd.offline.overflow_record docs/races.md

The document has a table between two marks, which is written anew.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rocm_lab.page_parts import with_rows
from rocm_lab.races.ttir import parse_ttir
from tests.amd.offline import matrix, sparse_matrix, state_matrix
from tests.amd.offline.index_ranges import verdict_of
from tests.amd.offline.ttir_of import ttir_by

_ARCH = "gfx942"
_ROWS = (
    "gfx942-32x8-128-128-bfloat16-page16-below_2gib",
    "gfx942-32x8-128-128-bfloat16-page16-above_2gib",
    "gfx942-64x8-64-64-bfloat16-e4m3fnuz_token-page16-below_2gib",
    "gfx942-16x1-576-512-latent-bfloat16-page64-below_2gib",
    "gfx942-16x1-576-512-latent-bfloat16-page64-above_2gib",
)


class Launches(NamedTuple):
    """Launches of a row of a matrix."""

    name: str
    arch: str
    call: Callable[[], None]

    def __str__(self) -> str:
        return self.name


def all_launches() -> Iterator[Launches]:
    """Of every row of every matrix."""
    for row in matrix.ROWS:
        yield Launches(str(row), row.arch, partial(matrix.launch_all, row))
    for other in (*sparse_matrix.ROWS, *state_matrix.ROWS):
        yield Launches(str(other), other.arch, other.launch)


def recorded_launches() -> Iterator[Launches]:
    """Those of the document: they have every kernel."""
    layers = {str(row) for row in matrix.ROWS} - {*_ROWS}
    return (each for each in all_launches() if each.arch == _ARCH and each.name not in layers)


def main(document: Path) -> int:
    """Prove, print, write; the exit status."""
    answers: dict[str, Counter[str]] = {}
    variants = dict.fromkeys(ttir for each in recorded_launches() for ttir in ttir_by(each.call, each.arch))
    for ttir in variants:
        proof, conditions = verdict_of(ttir)
        answer = f"proved if {'; '.join(conditions)}" if conditions else "proved"
        if proof.faults:
            answer = f"not proved: {proof.faults[0]}"
        answers.setdefault(parse_ttir(ttir).name, Counter())[answer] += 1
    rows = [f"| `{name}` | {found.total()} | {_shortest(found)} |\n" for name, found in sorted(answers.items())]
    print(*rows, sep="", end="")
    document.write_text(with_rows(document.read_text(), "overflow", rows))
    return 0


def _shortest(found: Counter[str]) -> str:
    """What holds for all variants of a kernel: the conditions of all, or the first fault."""
    faults = sorted(each for each in found if each.startswith("not"))
    conditions = sorted(
        {part for each in found for part in each.removeprefix("proved").removeprefix(" if ").split("; ")}
    )
    return faults[0] if faults else f"proved if {'; '.join(filter(None, conditions))}".removesuffix(" if ")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
