"""Which cases of a test every run has, where its parameters make many combinations."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import TypeVar

import pytest

Case = TypeVar("Case")


def cover(cases: Sequence[tuple[Case, Sequence[Hashable]]]) -> list[Case]:
    """Few of the cases in which each value of each parameter occurs: the same ones in every process.

    cases: each with the values of its parameters, in one order.
    """
    missing = {(at, value) for _, values in cases for at, value in enumerate(values)}
    chosen: list[Case] = []
    while missing:
        case, values = max(cases, key=lambda each: len(missing & set(enumerate(each[1]))))
        chosen.append(case)
        missing -= set(enumerate(values))
    return chosen


def leave_to_the_night(items: Sequence[pytest.Item]) -> None:
    """Mark what tests with the mark `each_value` leave to .ci/nightly. Other marks leave cases to it first.

    `long` does so under the interpreter: on the host those cases run.
    """
    at_night = {"nightly", "long"} if os.environ.get("TRITON_INTERPRET") == "1" else {"nightly"}
    functions: dict[str, list[tuple[pytest.Item, Sequence[Hashable]]]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "each_value" in marks and not marks & at_night:
            assert isinstance(item, pytest.Function)
            # One id for each decorator, however many parameters it has: what was written as a case stays one.
            case = item, tuple(item.callspec._idlist)
            functions.setdefault(item.nodeid.partition("[")[0], []).append(case)
    for cases in functions.values():
        by_day = cover(cases)
        for item, _ in cases:
            if item not in by_day:
                item.add_marker(pytest.mark.nightly)
