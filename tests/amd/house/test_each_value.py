"""What the mark `each_value` leaves to the night, and what it never does."""

from __future__ import annotations

from itertools import product

import pytest

from tests.amd.each_value import cover

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
    assert set(cover(cases)) == {("dense", 5), ("latent", 1)}


def test_every_process_chooses_the_same() -> None:
    cases = [(values, values) for values in product(KINDS, SIZES)]
    assert cover(cases) == cover(list(cases))


@pytest.mark.each_value
@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", "ab")
def test_other_combinations_have_the_mark_of_the_night(request: pytest.FixtureRequest, first: int, second: str) -> None:
    of_test = [item for item in request.session.items if item.name.startswith("test_other_combinations_have")]
    by_day = {item.name for item in of_test if not item.get_closest_marker("nightly")}
    if len(of_test) == 6:  # all were asked for; on a GPU all of them are of the day
        assert len(by_day) in (3, 6)
    assert first in range(3) and second in "ab"
