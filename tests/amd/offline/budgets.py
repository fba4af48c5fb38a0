"""The limits of each kernel's cost on AMD, by Triton version: the accepted costs plus a tenth.

    python -m tests.amd.offline.budgets [NAME...]

accepts the costs of the installed Triton: it rewrites budgets/<Triton>/<arch>/<kernel>.csv, one line per variant that a
row of the matrix, or of the sparse attention matrix, launches. With NAMEs it compiles only rows whose own name contains
one of them, and the lines of the other rows stay. The oldest supported Triton has the rows that it compiles in the
gate.
"""

from __future__ import annotations

import csv
import functools
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from triton.compiler import CompiledKernel

from tests.amd.offline.code_object import read_amd_code
from tests.amd.offline.compiling import AMD_ARCHS, OLDEST_TRITON, compiled_kernels
from tests.amd.offline.matrix import ROWS, Row
from tests.amd.offline.sparse_matrix import ROWS as SPARSE_ROWS
from tests.amd.offline.sparse_matrix import SparseRow, compiled_sparse_kernels

AnyRow = Row | SparseRow
FOLDER = Path(__file__).parent / "budgets"

# A cost may exceed the accepted one by this part of it.
MARGIN = 0.1
_MUST_NOT_GROW = ("vgprs", "agprs", "lds_bytes", "code_bytes", "matrix_ops")
_MUST_NOT_SHRINK = ("waves_per_simd", "buffer_loads")


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a variant of a kernel; see AmdCode."""

    vgprs: int
    agprs: int
    lds_bytes: int
    code_bytes: int
    waves_per_simd: int
    matrix_ops: int
    buffer_loads: int


@dataclass(frozen=True, slots=True)
class Variant:
    """The number-th variant of a kernel among those that a row launches."""

    row: str
    kernel: str
    number: int


Costs = dict[Variant, Cost]


def rows_with_budgets(version: str) -> list[AnyRow]:
    """The rows whose costs are accepted with a Triton version."""
    rows: tuple[AnyRow, ...] = (*ROWS, *SPARSE_ROWS)
    return [row for row in rows if row.arch in AMD_ARCHS and (row.on_oldest or version != OLDEST_TRITON)]


def costs_of(row: AnyRow, kernels: Iterable[CompiledKernel]) -> Costs:
    """The costs of the kernels that a row launches."""
    seen: Counter[str] = Counter()
    costs = {}
    for compiled in kernels:
        code = read_amd_code(compiled)
        cost = Cost(**{field.name: getattr(code, field.name) for field in fields(Cost)})
        costs[Variant(str(row), compiled.name, seen[compiled.name])] = cost
        seen[compiled.name] += 1
    return costs


def read(version: str, row: AnyRow) -> Costs:
    """Returns the accepted costs of a row; empty if there are none."""
    return {variant: cost for variant, cost in _accepted(version, row.arch).items() if variant.row == str(row)}


@functools.cache
def _accepted(version: str, arch: str) -> Costs:
    costs = {}
    for path in sorted((FOLDER / version / arch).glob("*.csv")):
        with open(path, newline="") as file:
            for line in csv.DictReader(file):
                cost = Cost(**{field.name: int(line[field.name]) for field in fields(Cost)})
                costs[Variant(line["row"], path.stem, int(line["variant"]))] = cost
    return costs


def complaints(accepted: Costs, found: Costs) -> Iterator[str]:
    """Yields the costs that do not fit their budget, a clause each."""
    for variant in sorted(set(accepted) | set(found), key=lambda v: (v.kernel, v.number)):
        name = f"{variant.kernel} variant {variant.number}"
        if variant not in found:
            yield f"{name} has a budget and is not launched"
        elif variant not in accepted:
            yield f"{name} has no budget"
        else:
            before, now = asdict(accepted[variant]), asdict(found[variant])
            for cost in _MUST_NOT_GROW:
                if now[cost] > before[cost] * (1 + MARGIN):
                    yield f"{name}: {cost} grew from {before[cost]} to {now[cost]}"
            for cost in _MUST_NOT_SHRINK:
                if now[cost] < before[cost] * (1 - MARGIN):
                    yield f"{name}: {cost} fell from {before[cost]} to {now[cost]}"


def _measure(row: AnyRow) -> Costs:
    # Compiling touches no memory; filled with NaN, a cache above 2 GiB would be resident.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return costs_of(row, compiled_kernels(row) if isinstance(row, Row) else compiled_sparse_kernels(row))


def write(names: Sequence[str] = ()) -> None:
    """Accepts the installed Triton's costs of the matrix, or of its rows whose own name contains one of these."""
    version = triton.__version__
    rows = rows_with_budgets(version)
    renewed = [row for row in rows if not names or any(name in str(row) for name in names)]
    costs = {str(row): read(version, row) for row in rows if row not in renewed}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        costs |= zip(map(str, renewed), pool.map(_measure, renewed), strict=True)
    lines: dict[Path, list[list[object]]] = defaultdict(list)
    for row in rows:
        for variant, cost in costs[str(row)].items():
            path = FOLDER / version / row.arch / f"{variant.kernel}.csv"
            lines[path].append([variant.row, variant.number, *asdict(cost).values()])
    shutil.rmtree(FOLDER / version, ignore_errors=True)
    for path, entries in lines.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", newline="") as file:
            out = csv.writer(file, lineterminator="\n")
            out.writerow(["row", "variant", *(field.name for field in fields(Cost))])
            out.writerows(entries)


if __name__ == "__main__":
    write(sys.argv[1:])
