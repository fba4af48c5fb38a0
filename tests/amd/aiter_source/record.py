"""Run every case against the checkout that AITER_SOURCE names, and write what came of it into a document.

    AITER_SOURCE=... python -m tests.amd.aiter_source.record docs/aiter_source.md [--on gfx950] [--kernel mla]

The document has a table between two marks, with a line for each kernel on each of gfx942, gfx950 and the interpreter.
The lines that were run are written anew, whatever they say, once they are complete. Exits with 1 when a kernel or the
provider is wrong.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import triton

from rocm_attn.problem import Scales
from rocm_lab.page_parts import rows_of, with_rows
from rocm_lab.simulator.launcher import ARCHS
from tests.amd.aiter_source.cases import GLUON, Outcome, Verdict
from tests.amd.aiter_source.checkout import Checkout
from tests.amd.aiter_source.engines import IS_INTERPRETED, interpret, simulate
from tests.amd.aiter_source.selected import ALL_CASES, ALL_INTERPRETED, AnyCase

INTERPRETER = "interpreter"
PLACES = (*ARCHS, INTERPRETER)

_LONGEST_REASON = 160


@dataclass(frozen=True, slots=True)
class Line:
    """A case that was run. where: an arch, or the interpreter"""

    where: str
    case: AnyCase
    outcome: Outcome

    @property
    def group(self) -> tuple[str, str]:
        """The line of the table that it belongs to: place and kernel."""
        return self.where, kernel_of(self.case)


def kernel_of(case: AnyCase) -> str:
    """Returns the table's name for the kernel and its group of cases."""
    windows = " (windows)" if case.kernel == GLUON and case.name.startswith("window") else ""
    return case.kernel.removeprefix("aiter.") + (" (eight bits)" if case.eight_bits is not Scales.NONE else windows)


def main(document: Path, places: Sequence[str], kernel: str) -> int:
    """Runs cases, prints a line for each, writes the document, returns the exit status. kernel: prefix of its name"""
    checkout = Checkout.named()
    start = f"| {checkout.commit()} | {checkout.date()} | {triton.__version__} |"
    is_wrong = False
    for where in places:
        lines = list(_interpreted(kernel) if where == INTERPRETER else _simulated(where, kernel))
        document.write_text(with_runs(document.read_text(), lines, start))
        is_wrong |= any(line.outcome.verdict is Verdict.WRONG for line in lines)
    return int(is_wrong)


def _simulated(arch: str, kernel: str) -> Iterator[Line]:
    # Processes are spawned: a forked process would inherit the threads that torch has started here.
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        cases = [case for case in ALL_CASES if kernel_of(case).startswith(kernel)]
        started = [(case, pool.submit(_outcome, case, arch)) for case in cases]
        for case, future in started:
            yield _printed(Line(arch, case, _result(future)))


def _outcome(case: AnyCase, arch: str) -> Outcome:
    return simulate(case, arch).outcome


def _result(future: Future[Outcome]) -> Outcome:
    error = future.exception()
    return Outcome(Verdict.WRONG, f"{type(error).__name__}: {error}") if error else future.result()


def _interpreted(kernel: str) -> Iterator[Line]:
    """Runs the cases in a process of its own, which prints a line for each case."""
    command = [sys.executable, "-m", "tests.amd.aiter_source.record", "--print", "--kernel", kernel]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    text = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    by_name = {str(case): case for case in ALL_INTERPRETED}
    for printed in text.splitlines():
        name, verdict, error, what = printed.split("\t")
        yield _printed(Line(INTERPRETER, by_name[name], Outcome(Verdict[verdict], what, float(error))))


def print_interpreted(kernel: str) -> None:
    assert IS_INTERPRETED
    for case in ALL_INTERPRETED:
        if kernel_of(case).startswith(kernel):
            outcome = interpret(case)
            print(case, outcome.verdict.name, outcome.error, " ".join(outcome.what.split()), sep="\t", flush=True)


def _printed(line: Line) -> Line:
    outcome = line.outcome
    print(
        f"{outcome.verdict.name} {line.where} {line.case} {outcome.error:.5f} {' '.join(outcome.what.split())}",
        flush=True,
    )
    return line


def with_runs(text: str, lines: Sequence[Line], start: str) -> str:
    """Returns the document with these lines in place of those with the same start (AITER, Triton), place and kernel."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        where, kernel = line.group
        groups.setdefault(f"{start} {where} | {kernel} |", []).append(line)
    kept = [row for row in rows_of(text, "runs") if not row.startswith(tuple(groups))]
    today = datetime.now(timezone.utc).date().isoformat()
    new = [
        f"{key} {len(group)} | {_largest_error(group)} | {_verdict(group)} | {today} |\n"
        for key, group in groups.items()
    ]
    return with_rows(text, "runs", sorted([*kept, *new]))


def _largest_error(group: Sequence[Line]) -> str:
    errors = [line.outcome.error for line in group if line.outcome.verdict is Verdict.RIGHT]
    return f"{max(errors):.4f}" if errors else ""


def _verdict(group: Sequence[Line]) -> str:
    """Returns the number of cases that are right, and each other case with its reason."""
    right = sum(line.outcome.verdict is Verdict.RIGHT for line in group)
    others: dict[str, list[str]] = {}
    for line in group:
        if line.outcome.verdict is not Verdict.RIGHT:
            reason = " ".join(line.outcome.what.split()).replace("|", "/")[:_LONGEST_REASON]
            others.setdefault(f"{line.outcome.verdict.value}: {reason}", []).append(line.case.name)
    parts = [f"{right} right"] if right else []
    return "; ".join(parts + [f"{', '.join(names)}: {why}" for why, names in others.items()])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("document", type=Path, nargs="?")
    parser.add_argument("--on", choices=PLACES, nargs="+", default=PLACES)
    parser.add_argument("--kernel", default="", help="what its name in the table begins with; all by default")
    parser.add_argument("--print", action="store_true", help="run what the interpreter runs, and write nothing")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = _arguments()
    if arguments.print:
        print_interpreted(arguments.kernel)
    else:
        sys.exit(main(arguments.document, arguments.on, arguments.kernel))
