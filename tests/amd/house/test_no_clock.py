"""No result of a test depends on the clock: no test sleeps, measures time, or gives up on a busy machine's delays."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.amd.house.source_tree import ROOT, python_files

_CLOCKS = {"time.sleep", "time.time", "time.perf_counter", "time.monotonic", "time.process_time", "timeit.Timer"}
_LAST_NAMES = {name.rpartition(".")[2] for name in _CLOCKS}
_LIMITS = {"timeout", "deadline"}
# Methods whose only positional number is a limit in seconds.
_WAITS = {"wait", "join", "poll", "communicate"}
# Every file with such a call contains one of these.
_WORDS = {*_CLOCKS, *(f"{name}=" for name in _LIMITS), *(f".{name}(" for name in _WAITS)}

# Calls that read a clock or set a limit -> the reason why no result depends on them.
HARMLESS = {
    "conftest.py: deadline=None": "no deadline",
    "driver/__main__.py: time.monotonic()": "a time that is printed, and how long somebody has asked for",
    "driver/guard_table.py: time.monotonic()": "how long somebody has asked for",
    "server/load/clients.py: timeout=None": "no limit, in the place of OpenAI's 5 seconds for a connection",
    "server/load/__main__.py: time.monotonic()": "how long a load goes on that somebody has asked for",
    "server/gateways.py: time.sleep(0.2)": "between two looks, of which there are as many as it takes",
    "simulator/record.py: time.monotonic()": "a time that is written down",
}


def uses_of_clocks(tree: ast.AST) -> Iterator[str]:
    """Yields every call that reads a clock or sleeps, and every limit in seconds that a call is given, as source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            reads = _last_name(node.func) in _LAST_NAMES and ast.unparse(node.func) in _CLOCKS
            if reads or (isinstance(node.func, ast.Attribute) and node.func.attr in _WAITS and _is_number(node.args)):
                yield ast.unparse(node)
        elif isinstance(node, ast.keyword) and node.arg in _LIMITS:
            yield ast.unparse(node)


def _last_name(function: ast.expr) -> str:
    """Returns the last part of a dotted name; it is slow to write the source of a whole call."""
    return function.attr if isinstance(function, ast.Attribute) else ""


def _is_number(arguments: list[ast.expr]) -> bool:
    return [type(argument.value) for argument in arguments if isinstance(argument, ast.Constant)] in ([int], [float])


def test_no_test_looks_at_a_clock() -> None:
    folder = ROOT / "tests" / "amd"
    found = {
        f"{path.relative_to(folder).as_posix()}: {use}"
        for path in python_files(folder)
        if any(word in (text := path.read_text()) for word in _WORDS)
        for use in uses_of_clocks(ast.parse(text))
    }
    assert found == HARMLESS.keys()


@pytest.mark.parametrize(
    "source",
    ["time.sleep(1)", "assert time.perf_counter() < 1", "run(timeout=9)", "settings(deadline=200)", "process.wait(60)"],
)
def test_a_clock_is_found(source: str) -> None:
    assert list(uses_of_clocks(ast.parse(source)))
