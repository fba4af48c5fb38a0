"""AITER's own Triton and Gluon kernels, from a checkout, as gfx942 and gfx950 machine code under the provider."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rocm_attn.providers.aiter import library
from rocm_lab.simulator.launcher import ARCHS, simulated
from tests.amd.aiter_source.cases import CASES, GLUON, GLUON_VERIFY, UNIFIED, WRAPPERS, SourceCase, Verdict
from tests.amd.aiter_source.checkout import Checkout, imported
from tests.amd.aiter_source.engines import simulate
from tests.amd.aiter_source.selected import ALL_CASES, SELECTED_CASES, AnyCase

Call = dict[str, Any]
every_arch = pytest.mark.parametrize("arch", ARCHS)


def windows_of(kernel: str) -> dict[int, SourceCase]:
    """Returns a kernel's cases that are about a window alone, by window_left."""
    cases = [case for case in CASES if case.kernel == kernel and case.name.startswith("window")]
    return {case.problem.window_left: case for case in cases if case.name == f"window{case.problem.window_left}"}


@every_arch
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_a_kernel_of_aiters_gives_the_right_answer(case: AnyCase, arch: str) -> None:
    outcome = simulate(case, arch).outcome
    assert outcome.verdict is not Verdict.WRONG, outcome.what
    if outcome.verdict is Verdict.REFUSED:
        pytest.skip(outcome.what)


@pytest.mark.parametrize("case", WRAPPERS, ids=str)
def test_a_wrapper_around_assembly_takes_what_the_provider_passes(case: SourceCase) -> None:
    """simulate() treats a run without a kernel as wrong, so this test imports the checkout itself."""
    checkout = Checkout.named()
    with simulated("gfx942"), imported(checkout, "gfx942"):
        outcome = case.outcome(checkout.target("gfx942"))
    assert outcome.verdict is Verdict.RIGHT, outcome.what


def assert_noticed(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Call], Call], case: AnyCase) -> None:
    """Checks that a case is wrong while a function of AITER's gets other arguments. change: call -> what differs"""
    load = getattr(library, name)

    def load_changed() -> Any:
        function = load()
        return lambda **call: function(**{**call, **change(call)})

    monkeypatch.setattr(library, name, load_changed)
    outcome = simulate(case, "gfx950").outcome
    assert outcome.verdict is Verdict.WRONG
    assert "not close" in outcome.what


@pytest.mark.parametrize("window", [0, 15, 256])
@pytest.mark.parametrize("keys", [-1, 1])
def test_a_window_of_pa_decode_gluon_that_is_off_by_one_key_is_noticed(
    window: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(call: Call) -> Call:
        return {"sliding_window": call["sliding_window"] + keys}

    assert_noticed(monkeypatch, "pa_decode_gluon", shifted, windows_of(GLUON)[window])


def test_a_verify_step_of_pa_decode_gluon_without_a_window_loses_keys_at_ends_of_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That is why the provider always gives it one."""
    (case,) = (case for case in CASES if case.kernel == GLUON_VERIFY and case.name == "ends")
    assert_noticed(monkeypatch, "pa_decode_gluon", lambda call: {"sliding_window": 0}, case)


@pytest.mark.parametrize("window", [1, 15, 256])
@pytest.mark.parametrize("keys", [-1, 1])
def test_a_window_of_unified_attention_that_is_off_by_one_key_is_noticed(
    window: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(call: Call) -> Call:
        return {"window_size": (call["window_size"][0] + keys, 0)}

    assert_noticed(monkeypatch, "unified_attention", shifted, windows_of(UNIFIED)[window])


@pytest.mark.parametrize(("name", "places"), [("page1", 16), ("page16", 1)])  # a page of one token is 16 places
def test_selected_places_that_are_off_by_one_are_noticed(
    name: str, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(call: Call) -> Call:
        chosen = call["topk_indices"]
        return {"topk_indices": torch.where(chosen < 0, chosen, chosen - places)}

    (case,) = (case for case in SELECTED_CASES if case.name == name)
    assert_noticed(monkeypatch, "unified_attention_sparse_mla", shifted, case)
