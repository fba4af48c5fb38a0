"""Requirements on the installed AITER, and the messages if it does not meet them."""

import importlib.util
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import Unsupported
from rocm_attn.machine.aiter_releases import written_for
from rocm_attn.problem import Problem
from rocm_attn.providers.aiter import library
from rocm_attn.providers.aiter.entries import ENTRIES
from rocm_attn.providers.aiter.selected import SELECTED_ENTRIES
from tests.amd.aiter import conftest
from tests.amd.aiter.checks import ContractBroken
from tests.amd.aiter.serving import plain_problem, vectorised_problem, world
from tests.amd.aiter.signatures import E4048607, Release
from tests.amd.aiter.stand_in import StandIn, install
from tests.amd.vectorised import linear_keys


def test_every_recorded_release_is_accepted(release: StandIn) -> None:
    missing = dict(library.unavailable())
    if release.release is not E4048607:
        complaint = missing.pop("aiter.unified_attention[vectorised]")
        assert complaint.startswith("the installed AITER's unified_attention takes no shuffled_kv_cache")
    assert missing == {}


def test_every_bound_row_has_an_entry_point_and_no_other() -> None:
    over_selections = {row.name for row in SELECTED_ENTRIES}
    assert set(library.ENTRY_POINTS) == {row.name for row in ENTRIES if not row.not_bound} | over_selections


def test_without_aiter_every_kernel_says_that_it_is_not_installed() -> None:
    assert "aiter" not in sys.modules
    missing = library.unavailable()
    assert set(missing) == set(library.ENTRY_POINTS)
    assert all("install the distribution amd-aiter" in reason for reason in missing.values())


def test_the_tests_do_not_see_an_aiter_that_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the image for CI there is one."""
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").touch()
    (tmp_path / "amd_aiter-9.0.dist-info").mkdir()
    (tmp_path / "amd_aiter-9.0.dist-info" / "METADATA").write_text("Name: amd-aiter\nVersion: 9.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.util.find_spec("aiter"), "one in another folder is a test's own"
    monkeypatch.setattr(conftest, "INSTALLED", importlib.util.find_spec("aiter"))
    assert importlib.util.find_spec("aiter") is None
    with pytest.raises(PackageNotFoundError):
        version("amd-aiter")
    test_without_aiter_every_kernel_says_that_it_is_not_installed()


def test_another_package_of_that_name_is_reported_apart_from_amds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiter", ModuleType("aiter"))
    complaint = library.unavailable()["aiter.paged_attention_ragged"]
    assert "the package aiter has no paged_attention_ragged, and no folder ops" in complaint
    assert "install the distribution amd-aiter" in complaint


def moved(name: str, monkeypatch: pytest.MonkeyPatch, to: str = "") -> str:
    """Returns the complaint about a function that is no longer in its first place. to: a place that has it now"""
    installed = install(E4048607, monkeypatch)
    function: library.AiterFunction = getattr(library, name)
    delattr(sys.modules[function.places[0]], name)
    if to:
        monkeypatch.setitem(sys.modules, to, ModuleType(to))
        setattr(sys.modules[to], name, installed.function(name))
    (complaint,) = {library.unavailable().get(row, "") for row in library.ENTRY_POINTS if row == f"aiter.{name}"}
    return complaint


@pytest.mark.parametrize("function", [library.unified_attention, library.pa_decode_gluon], ids=lambda each: each.name)
def test_a_function_is_found_at_each_of_its_places(
    function: library.AiterFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in function.places[1:]:
        assert moved(function.name, monkeypatch, place) == ""
        assert function() is getattr(sys.modules[place], function.name)


def test_a_function_that_moved_away_is_named_with_its_new_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "aiter" / "ops" / "assembly").mkdir(parents=True)
    (tmp_path / "aiter" / "ops" / "assembly" / "mla.py").write_text("def mla_decode_fwd(q):\n    pass\n")
    installed = install(E4048607, monkeypatch)
    monkeypatch.setattr(sys.modules["aiter"], "__path__", [str(tmp_path / "aiter")], raising=False)
    delattr(sys.modules["aiter.mla"], "mla_decode_fwd")
    complaint = library.unavailable()["aiter.mla_decode_fwd"]
    assert complaint.startswith(
        f"AITER {installed.release.version} has no mla_decode_fwd in aiter.mla: it has moved to"
    )
    assert "moved to aiter.ops.assembly.mla, which is not called" in complaint
    assert "written for AITER v0.1.15 to v0.1.20" in complaint
    assert "install" not in complaint, "the installation is right"


def test_a_function_that_is_gone_is_said_to_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    complaint = moved("paged_attention_ragged", monkeypatch)
    assert "has no paged_attention_ragged in aiter: it is gone; this version of rocm_attn was written for" in complaint


def test_a_module_that_cannot_be_imported_has_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text("")
    (tmp_path / "aiter" / "mla.py").write_text("import flydsl_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    complaint = library.unavailable()["aiter.mla_prefill_fwd"]
    for name in ("aiter", "aiter.mla"):
        sys.modules.pop(name, None)
    assert "AITER is not installed correctly (No module named 'flydsl_that_is_missing')" in complaint


@pytest.mark.parametrize("version", ["0.1.14.post1", "0.1.10+rocm7.2", "0.1.9.post1"])
def test_no_kernel_of_a_release_before_the_first_one_runs(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(Release(version, E4048607.parameters), monkeypatch)
    sentence = f"AITER {version} is older than v0.1.15, the first that is served; install a later release of amd-aiter"
    assert library.unavailable() == dict.fromkeys(library.ENTRY_POINTS, sentence)
    with pytest.raises(Unsupported, match="is older than v0"):
        world(plain_problem())


def without_page_lengths() -> Release:
    """Returns a release whose mha_batch_prefill_func takes pages of one token alone, as that of v0.1.9 did."""
    parameters = dict(E4048607.parameters)
    name = "mha_batch_prefill_func"
    parameters[name] = parameters[name].replace("kv_last_page_lens= ", "")
    return Release("0.1.29", parameters)


def test_a_release_that_lacks_a_parameter_is_named_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(without_page_lengths(), monkeypatch)
    complaint = library.unavailable()["aiter.mha_batch_prefill_func"]
    assert "mha_batch_prefill_func takes no kv_last_page_lens" in complaint
    assert f"was written for {written_for()}" in complaint


def test_a_release_that_demands_more_is_named_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = dict(E4048607.parameters)
    parameters["unified_attention"] = "tiles " + parameters["unified_attention"]
    install(Release("9", parameters), monkeypatch)
    assert "unified_attention requires tiles" in library.unavailable()["aiter.unified_attention"]


def test_a_keyword_of_a_later_release_that_has_a_default_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later files of AITER have unified_attention(..., backend=None)."""
    parameters = dict(E4048607.parameters)
    parameters["unified_attention"] += " backend="
    install(Release("0.1.29", parameters), monkeypatch)
    assert library.unavailable() == {}


def test_a_drifted_kernel_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    install(without_page_lengths(), monkeypatch)
    serving = world(plain_problem(16, dims=(128, 128)))
    selection = serving.runtime.selections[0]
    assert selection.kernels[StepKind.EXTEND].entry.name == "aiter.unified_attention"
    assert any("takes no kv_last_page_lens" in line for line in selection.refusal_lines())


def test_aiter_asked_for_by_name_and_not_installed_is_refused_with_every_reason() -> None:
    with pytest.raises(Unsupported) as caught:
        world(plain_problem())
    for kernel in (
        "decode: aiter.paged_attention_ragged",
        "extend: aiter.unified_attention",
        "decode: aiter.pa_decode_gluon",
    ):
        assert any(reason.startswith(kernel) for reason in caught.value.reasons), kernel


# Calls with one thing wrong: the function, a parameter, and another value, which the real function would misread.
WRONG_CALLS: Mapping[str, tuple[str, str, Any]] = {
    "int64 indptr": ("paged_attention_ragged", "kv_indptr", torch.int64),
    "int64 page list": ("mha_batch_prefill_func", "kv_page_indices", torch.int64),
    "int32 lengths": ("unified_attention", "seqused_k", torch.int32),
    "no scale": ("flash_attn_varlen_func", "softmax_scale", None),
    "a partition too few": ("paged_attention_ragged", "max_num_partitions", 0),
    "decode's max_seqlen_q in a mixed step": ("unified_attention", "max_seqlen_q", 1),
}

# The same over vectorised pools, with the parameter names of the functions that read them.
WRONG_VECTORISED_CALLS: Mapping[str, tuple[str, str, Any]] = {
    "another dtype to compute in": ("pa_decode_gluon", "compute_type", torch.bfloat16),
    "int64 lengths": ("pa_decode_gluon", "context_lengths", torch.int64),
    "parts without scratch": ("pa_decode_gluon", "max_context_partition_num", 3),
    "a window of -1": ("pa_decode_gluon", "sliding_window", -1),
    "parts of 256 keys": ("pa_decode_gluon", "ps", False),
    "a linear cache": ("mha_batch_prefill_func", "k", linear_keys),
    "a cache that is not shuffled": ("unified_attention", "shuffled_kv_cache", False),
}


@pytest.mark.fast(5)
@pytest.mark.parametrize(
    ("problem", "function", "name", "value"),
    [
        *((plain_problem(16, dims=(128, 128)), *call) for call in WRONG_CALLS.values()),
        *((vectorised_problem(), *call) for call in WRONG_VECTORISED_CALLS.values()),
    ],
    ids=[*WRONG_CALLS, *WRONG_VECTORISED_CALLS],
)
def test_the_stand_in_refuses_a_call_with_one_thing_wrong(
    problem: Problem, function: str, name: str, value: Any, aiter: StandIn
) -> None:
    serving = world(problem)

    def changed(call: Mapping[str, Any]) -> Mapping[str, Any]:
        if not isinstance(call[name], torch.Tensor):
            return {name: value}
        return {name: value(call[name]) if callable(value) else call[name].to(value)}

    aiter.change(function, changed)
    with pytest.raises(ContractBroken):
        serving.served([5, 2], [1, 1], [2, 7], [1, 6], [1, 4])
