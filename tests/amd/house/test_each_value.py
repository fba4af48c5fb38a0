"""What the mark `each_value` leaves to the night, and what it never does."""

from __future__ import annotations

from itertools import product
from unittest.mock import Mock

import pytest

from tests.amd.each_value import cover, leave_to_the_night

KINDS, SIZES, GRAPHS = ("dense", "latent", "sparse"), (1, 5, 16, 64), (False, True)


def test_each_value_of_each_parameter_stays_in_few_cases() -> None:
    cases = [(values, values) for values in product(KINDS, SIZES, GRAPHS)]
    chosen = cover(cases)
    assert [set(values) for values in zip(*chosen, strict=True)] == [set(KINDS), set(SIZES), set(GRAPHS)]
    assert len(chosen) == len(SIZES)


def test_where_values_do_not_meet_all_their_cases_stay() -> None:
    cases = [(name, (name,)) for name in KINDS]
    assert cover(cases) == list(KINDS)


def test_a_value_that_only_one_case_has_stays() -> None:
    cases = [(values, values) for values in [("dense", 1), ("dense", 5), ("latent", 1)]]
    assert set(cover(cases)) >= {("dense", 5), ("latent", 1)}


def test_every_process_chooses_the_same() -> None:
    cases = [(values, values) for values in product(KINDS, SIZES)]
    assert cover(cases) == cover(list(cases))


def item_of(values: tuple[str, str], *marks: str) -> Mock:
    """A case as pytest has collected it."""
    item = Mock(spec=pytest.Function, nodeid=f"tests/test_it.py::test_it[{'-'.join(values)}]")
    item.callspec = Mock(_idlist=values)
    item.iter_markers.return_value = [getattr(pytest.mark, name).mark for name in marks]
    return item


def left(items: list[Mock]) -> list[bool]:
    """Of each, whether it is left to the night."""
    leave_to_the_night(items)
    return [item.add_marker.called for item in items]


def test_other_combinations_are_left_to_the_night_where_the_mark_says_so() -> None:
    combinations = list(product("ab", "cd"))
    assert left([item_of(values, "each_value") for values in combinations]) == [False, True, True, False]
    assert left([item_of(values) for values in combinations]) == [False] * 4


@pytest.mark.parametrize("interpreted", [False, True])
def test_a_case_that_is_the_nights_stands_for_no_value(monkeypatch: pytest.MonkeyPatch, interpreted: bool) -> None:
    """Under the interpreter the long ones are the night's."""
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
    for mark in ("nightly", "long"):
        items = [item_of(values, "each_value") for values in (("a", "d"), ("b", "c"), ("b", "d"))]
        found = left([item_of(("a", "c"), "each_value", mark), *items])
        is_nights = mark == "nightly" or interpreted
        assert found == ([False, False, False, True] if is_nights else [False, True, True, False])
