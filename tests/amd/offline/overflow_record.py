"""Proves that indices of all kernels fit 32 bits, and writes a document.

    python -m tests.amd.offline.overflow_record docs/races.md

The document has a table between two marks, which is written anew.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rocm_lab.page_parts import with_rows
from rocm_lab.races.ttir import parse_ttir
from tests.amd.offline import matrix, sparse_matrix, state_matrix
from tests.amd.offline.index_ranges import conditions_of, faults_of
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


@dataclass(slots=True)
class Answers:
    """The answers about a kernel's variants: the first fault of each that is not proved, and the conditions of all."""

    variants: int = 0
    faults: set[str] = field(default_factory=set)
    conditions: set[str] = field(default_factory=set)

    def add(self, ttir: str) -> None:
        """Adds the answer about a variant."""
        self.variants += 1
        faults = faults_of(ttir)
        self.faults.update(faults[:1])
        self.conditions.update(() if faults else conditions_of(ttir))

    def words(self) -> str:
        """The answer about all of them."""
        if self.faults:
            return f"not proved: {min(self.faults)}"
        return f"proved if {'; '.join(sorted(self.conditions))}" if self.conditions else "proved"


def all_launches() -> Iterator[Launches]:
    """The launches of every row of every matrix."""
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
    answers: dict[str, Answers] = {}
    variants = dict.fromkeys(ttir for each in recorded_launches() for ttir in ttir_by(each.call, each.arch))
    for ttir in variants:
        answers.setdefault(parse_ttir(ttir).name, Answers()).add(ttir)
    rows = [f"| `{name}` | {found.variants} | {found.words()} |\n" for name, found in sorted(answers.items())]
    print(*rows, sep="", end="")
    document.write_text(with_rows(document.read_text(), "overflow", rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
