"""Cases that the mark `fast` leaves to the night, and cases that it never leaves."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.amd.fast import cover, leave_to_the_night, spread, values_of

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


def test_tests_with_the_same_cases_have_them_in_different_pairs() -> None:
    cases = [(values, values) for values in product("ab", "cd")]
    chosen = {frozenset(cover(cases, f"tests/test_it.py::test_{name}")) for name in "abcdefgh"}
    assert chosen == {frozenset({("a", "c"), ("b", "d")}), frozenset({("a", "d"), ("b", "c")})}


class Collected:
    """A plugin that keeps the items that pytest has collected."""

    items: list[pytest.Function]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = [item for item in session.items if isinstance(item, pytest.Function)]


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


@pytest.mark.parametrize("interpreted", [False, True])
def test_every_run_has_as_many_cases_as_their_mark_says(monkeypatch: pytest.MonkeyPatch, interpreted: bool) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
    fast = pytest.mark.fast
    assert left(fast(2)) == [False, True, True, False]
    assert left(fast(2, interpreted=1)) == [False, True, True, interpreted]
    assert left(fast(interpreted=0)) == [interpreted, True, True, interpreted]
    assert left(fast(1), fast(interpreted=0)) == [interpreted, True, True, True]


@pytest.mark.parametrize("interpreted", [False, True])
def test_a_test_without_parameters_may_be_left_out_under_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, interpreted: bool
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
    item = item_of((), pytest.mark.fast(interpreted=0))
    leave_to_the_night([item])
    assert item.add_marker.called == interpreted


def test_few_cases_have_values_that_differ_and_lie_apart() -> None:
    assert spread([(name, (name,)) for name in "abcdef"], 3) == ["a", "f", "c"]
    assert spread([(name, (name,)) for name in "ab"], 3) == ["a", "b"]
    kinds = [(values, values) for values in product(KINDS, GRAPHS)]
    assert {graphs for _, graphs in spread(kinds, 2)} == set(GRAPHS)
    assert {kind for kind, _ in spread(kinds, 3)} == set(KINDS)


@pytest.mark.parametrize(("dims", "kind"), [([64, 64], "dense"), ([64, 64], "latent")])
@pytest.mark.parametrize("graphs", GRAPHS)
def test_a_case_of_several_parameters_is_one_value(
    dims: list[int], kind: str, graphs: bool, request: pytest.FixtureRequest
) -> None:
    """Lists are not hashable, and these two are equal: a case is identified by its objects."""
    item = request.node
    assert isinstance(item, pytest.Function)
    assert set(values_of(item)) == {(id(dims), id(kind)), (id(graphs),)}
