"""The choice of cases that every run has, if a test's parameters make many of them, and of those of a shard."""

import os
import zlib
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeVar

import pytest

Case = TypeVar("Case")


def cover(cases: Sequence[tuple[Case, Sequence[Hashable]]], test: str = "") -> list[Case]:
    """Returns a few cases in which each value of each parameter occurs. They are the same in every process.

    cases: each with the values of its parameters, in one order. test: the name of their test. If several cases fit
    equally well, tests begin at different ones, so that a combination left out in one test can occur in another.
    """
    first = zlib.crc32(test.encode()) % max(len(cases), 1)
    cases = [*cases[first:], *cases[:first]]
    missing = {(at, value) for _, values in cases for at, value in enumerate(values)}
    chosen: list[Case] = []
    while missing:
        case, values = max(cases, key=lambda each: len(missing & set(enumerate(each[1]))))
        chosen.append(case)
        missing -= set(enumerate(values))
    return chosen


def spread(cases: Sequence[tuple[Case, Sequence[Hashable]]], number: int) -> list[Case]:
    """Returns `number` of the cases, the first among them.

    Each next case has the values that are rarest so far; ties go to the case farthest from the chosen ones. cases: see
    cover()
    """
    left, chosen, seen = dict(enumerate(cases)), list[int](), Counter[Hashable]()

    def key(at: int) -> tuple[int, int]:
        distance = min((abs(at - other) for other in chosen), default=0)
        return -sum(seen[value] for value in enumerate(cases[at][1])), distance

    for _ in range(min(number, len(cases))):
        chosen.append(max(left, key=key))
        seen.update(enumerate(left.pop(chosen[-1])[1]))
    return [cases[at][0] for at in chosen]


def values_of(item: pytest.Function) -> list[Hashable]:
    """Returns one value per decorator, however many parameters it has: a tuple written as one case stays one.

    A value is identified by its objects, which all its cases share: few of them can be compared.
    """
    if not hasattr(item, "callspec"):
        return [None]  # the only case of a test without parameters
    own = {name: id(value) for name, value in item.callspec.params.items()}
    values: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        values.append(tuple(own.pop(name.strip()) for name in names))
    return [*values, *own.values()]  # then the parameters of fixtures


def number_of(item: pytest.Function) -> int | None:
    """Returns the number of cases in every run, None for each value once.

    A test's own mark goes before its module's, which may add `interpreted`, the number under Triton's interpreter: two
    where no mark has a number.
    """
    marks = list(item.iter_markers("fast"))
    numbers: list[int] = [number for mark in marks for number in mark.args]
    if os.environ.get("TRITON_INTERPRET") == "1":
        numbers = [mark.kwargs["interpreted"] for mark in marks if "interpreted" in mark.kwargs] or numbers or [2]
    return numbers[0] if numbers else None


def leave_to_the_night(items: Sequence[pytest.Item]) -> None:
    """Gives the mark `nightly` to the cases that tests with the mark `fast` leave to .ci/nightly."""
    functions: dict[str, list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("fast") and not item.get_closest_marker("nightly"):
            assert isinstance(item, pytest.Function)
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, of_one in functions.items():
        cases = [(item, values_of(item)) for item in of_one]
        number = number_of(of_one[0])
        fast = cover(cases, test) if number is None else spread(cases, number)
        for item in of_one:
            if item not in fast:
                item.add_marker(pytest.mark.nightly)


def of_shard(items: Sequence[pytest.Item], shard: str) -> list[pytest.Item]:
    """Returns the cases of a shard such as "2/5"; those of one group of pytest-xdist's stay together."""
    number, of = map(int, shard.split("/"))

    def key(item: pytest.Item) -> str:
        group = item.get_closest_marker("xdist_group")
        return str(group.args[0]) if group else item.nodeid

    return [item for item in items if zlib.crc32(key(item).encode()) % of == number - 1]
