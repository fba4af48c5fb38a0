"""Cases that the mark `fast` leaves to the night, and cases that it never leaves."""

from itertools import product
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.amd.fast import cover, leave_to_the_night

KINDS, SIZES, GRAPHS = ("dense", "latent", "sparse"), (1, 5, 16, 64), (False, True)


def test_each_value_of_each_parameter_stays_in_few_cases() -> None:
    cases = [(values, values) for values in product(KINDS, SIZES, GRAPHS)]
    chosen = cover(cases)
    assert [set(values) for values in zip(*chosen, strict=True)] == [set(KINDS), set(SIZES), set(GRAPHS)]
    assert len(chosen) == len(SIZES)


class Collected:
    """A plugin that keeps the items that pytest has collected."""

    items: list[pytest.Function]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = [item for item in session.items if isinstance(item, pytest.Function)]


@pytest.mark.nightly  # it collects all of the guards' tests
def test_every_run_has_each_safeguard_of_replayed_steps_with_a_real_provider() -> None:
    """A guard's test with graphs of torch's kernels must have such a case in every run, not only other combinations."""
    collected = Collected()
    plugins = ["benchmark", "schemathesis", "xdist", "cacheprovider", "faulthandler"]
    options = [option for plugin in plugins for option in ("-p", f"no:{plugin}")]
    guards = Path(__file__).parents[1] / "guards"
    assert pytest.main(["--collect-only", "--capture=no", *options, str(guards)], [collected]) == pytest.ExitCode.OK
    night: dict[str, list[bool]] = {}
    for item in collected.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if params.get("graphs") is True and params.get("provider") == "torch":
            is_nights = item.get_closest_marker("nightly") is not None
            night.setdefault(item.nodeid.partition("[")[0], []).append(is_nights)
    assert len(night) > 30
    assert [test for test, cases in night.items() if all(cases)] == []


def item_of(values: tuple[str, ...], *marks: pytest.MarkDecorator) -> Mock:
    """Returns a case as pytest has collected it, with its own marks first."""
    item = Mock(spec=pytest.Function, nodeid=f"tests/test_it.py::test_it[{'-'.join(values)}]")
    if values:
        item.callspec = Mock(params=dict(zip(("first", "second"), values, strict=True)))
    else:
        del item.callspec
    own = [mark.mark for mark in (*marks, pytest.mark.parametrize("first", values[:1]))]  # a fixture has the second
    item.iter_markers.side_effect = lambda name: [mark for mark in own if mark.name == name]
    item.get_closest_marker.side_effect = lambda name: next((mark for mark in own if mark.name == name), None)
    return item


def left(*marks: pytest.MarkDecorator) -> list[bool]:
    """Returns for each pair of two values whether it is left to the night."""
    items = [item_of(values, *marks) for values in product("ab", "cd")]
    leave_to_the_night(items)
    return [item.add_marker.called for item in items]


def test_other_combinations_are_left_to_the_night_where_the_mark_says_so() -> None:
    assert left(pytest.mark.fast) == [False, True, True, False]
    assert left() == [False] * 4


def test_a_case_that_is_the_nights_stands_for_no_value() -> None:
    items = [item_of(values, pytest.mark.fast) for values in (("a", "d"), ("b", "c"), ("b", "d"))]
    leave_to_the_night([item_of(("a", "c"), pytest.mark.fast, pytest.mark.nightly), *items])
    assert [item.add_marker.called for item in items] == [False, False, True]


def test_under_the_interpreter_two_cases_are_left_where_the_mark_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    items = [item_of((value, "x"), pytest.mark.fast) for value in "abcd"]
    leave_to_the_night(items)
    assert [item.add_marker.called for item in items].count(False) == 2


@pytest.mark.parametrize("interpreted", [False, True])
def test_every_run_has_as_many_cases_as_their_mark_says(monkeypatch: pytest.MonkeyPatch, interpreted: bool) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
    fast = pytest.mark.fast
    assert left(fast(2)) == [False, True, True, False]
    assert left(fast(2, interpreted=1)) == [False, True, True, interpreted]
    assert left(fast(interpreted=0)) == [interpreted, True, True, interpreted]
    assert left(fast(1), fast(interpreted=0)) == [interpreted, True, True, True]
