"""The table of known-bad releases: every row applies where it should, and nowhere else; the doctor prints it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rocm_attn.cli.doctor import known_faults
from rocm_attn.cli.doctor.finding import Finding, Severity
from rocm_attn.cli.doctor.machine import Distribution, Machine
from rocm_attn.cli.doctor.registry import diagnose
from rocm_attn.machine import known_bad as table
from rocm_attn.machine.known_bad import COMPONENTS, FEATURES, Facts, KnownBad, known_bad, matching, row_of
from rocm_attn.machine.releases import Release, ReleaseRange
from tests.amd.doctor.machines import CPU_ONLY, H200, MI300
from tests.amd.house.source_tree import ROOT

ROWS = known_bad()
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.thread)
NOT_INSTALLED: dict[str, Release | None] = dict.fromkeys(COMPONENTS)
EVERY = ReleaseRange()


def just_before(release: Release) -> Release:
    """Returns a release that is earlier, and later than every other one that is."""
    *numbers, last = release.numbers
    return Release((*numbers, last - 1))


def first_of(span: ReleaseRange) -> Release:
    return span.since if span.since != EVERY.since else just_before(span.before)


def facts_of(row: KnownBad) -> Facts:
    """Returns facts for which every condition of a row holds, and no more."""
    return Facts(
        releases={**NOT_INSTALLED, **{component: first_of(span) for component, span in row.releases.items()}},
        archs=frozenset(row.archs[:1]),
        model=row.models[0] if row.models else "LlamaForCausalLM",
        features={feature: feature in row.features for feature in FEATURES},
        heads=frozenset(row.heads[:1] or (1,)),
        environment={name: "other" if value.startswith("not ") else value for name, value in row.environment.items()},
    )


def threads(facts: Facts) -> dict[str, tuple[str, ...]]:
    """Returns the threads that match, with what each still needs."""
    return {row.thread: needs for row, needs in matching(facts)}


@each_row
def test_a_row_applies_from_its_first_bad_release_to_the_one_before_the_first_good_one(row: KnownBad) -> None:
    facts = facts_of(row)
    assert threads(facts)[row.thread] == ()
    for component, span in row.releases.items():
        if span.before != EVERY.before:
            last = {**facts.releases, component: just_before(span.before)}
            assert threads(replace(facts, releases=last))[row.thread] == ()


def one_thing_else(row: KnownBad) -> Iterator[tuple[str, Facts]]:
    """Yields facts that are those of a row but for one condition."""
    facts = facts_of(row)
    for component, span in row.releases.items():
        releases: dict[str, Release | None] = {"not installed": None}
        if span.since != EVERY.since:
            releases["just before"] = just_before(span.since)
        if span.before != EVERY.before:
            releases["the first good one"] = span.before
        for name, release in releases.items():
            yield f"{component} {name}", replace(facts, releases={**facts.releases, component: release})
    yield "another GPU", replace(facts, archs=frozenset({"gfx90a", "gfx1201"}))
    if row.models:
        yield "another model", replace(facts, model="LlamaForCausalLM")
    if row.heads:
        yield "other heads", replace(facts, heads=frozenset({1024}))
    for feature in row.features:
        yield f"not {feature}", replace(facts, features={**facts.features, feature: False})
    assert facts.environment is not None
    for name, value in row.environment.items():
        other = value.removeprefix("not ") if value.startswith("not ") else ""
        yield f"{name}={other}", replace(facts, environment={**facts.environment, name: other})


@each_row
def test_a_row_applies_to_nothing_else(row: KnownBad) -> None:
    others = dict(one_thing_else(row))
    assert len(others) > 1 + len(row.releases) + len(row.features)
    for name, facts in others.items():
        assert row.thread not in threads(facts), name


@each_row
def test_what_is_not_known_is_a_condition_in_words(row: KnownBad) -> None:
    """Only the release of one component is known."""
    component, span = next(iter(row.releases.items()))
    needs = threads(Facts(releases={component: first_of(span)}))[row.thread]
    said = len(row.releases) - 1 + 1 + bool(row.models) + bool(row.heads)
    assert len(needs) == said + len(row.features) + len(row.environment)
    assert {FEATURES[feature] for feature in row.features} <= set(needs)


def test_there_are_rows_for_every_feature_and_each_thread_once() -> None:
    assert len(ROWS) >= 60
    assert len({row.thread for row in ROWS}) == len(ROWS)
    assert {feature for row in ROWS for feature in row.features} == set(FEATURES)


def test_nothing_is_said_where_no_release_is_known() -> None:
    assert matching(Facts()) == ()
    assert matching(Facts(releases={"vllm": Release(())})) == ()


def test_a_release_whose_patch_is_not_known_may_be_bad() -> None:
    """ROCm 7.2 may be 7.2.0, which aborts captures, or a later one; 7.1 is bad, and 7.14 is not."""
    thread, words = "sgl-project/sglang#24011", "rocm before 7.2.1"
    of = {version: Facts(releases={"rocm": Release.of(version)}) for version in ("7.1", "7.2", "7.14", "7.2.1")}
    assert words not in threads(of["7.1"])[thread]
    assert [version for version, facts in of.items() if thread in threads(facts)] == ["7.1"]
    with_aiter = Facts(releases={"rocm": Release.of("7.2"), "aiter": Release.of("0.1.16")})
    assert words in threads(with_aiter)["ROCm/aiter#2857"]


GOOD: dict[str, Any] = {
    "thread": "ROCm/aiter#1",
    "releases": {"aiter": ["0.1.19", "0.1.20"]},
    "archs": ["gfx942"],
    "seen": "AITER 0.1.19",
    "end": "it is fixed in 0.1.20",
    "effect": "crash",
    "symptom": "it crashes",
}


def test_the_row_that_is_damaged_below_is_one() -> None:
    assert row_of(GOOD).releases["aiter"] == ReleaseRange(Release.of("0.1.19"), Release.of("0.1.20"))


@pytest.mark.parametrize(
    "damage",
    [
        {"thread": "aiter#1"},
        {"thread": "ROCm/aiter"},
        {"releases": {}},
        {"releases": {"torch": ["2.9.0", ""]}},
        {"releases": {"aiter": ["0.1.20", "0.1.19"]}},
        {"releases": {"aiter": ["0.1.19", "0.1.19"]}},
        {"releases": {"aiter": ["0.1", ""]}},
        {"releases": {"aiter": ["new", ""]}},
        {"archs": []},
        {"archs": ["MI300X"]},
        {"seen": " "},
        {"end": ""},
        {"effect": "bad"},
        {"symptom": ""},
        {"symptom": "two\nlines"},
        {"features": ["fast"]},
        {"heads": [0]},
        {"environment": {"not a name": "1"}},
        {"environment": {"lower": "not 1"}},
    ],
    ids=str,
)
def test_a_damaged_row_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"known_bad\.json"):
        row_of({**GOOD, **damage})


def test_a_row_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="fixed"):
        row_of({**GOOD, "fixed": True})


@pytest.mark.parametrize("name", GOOD)
def test_a_row_without_a_field_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        row_of({key: value for key, value in GOOD.items() if key != name})


def test_no_field_of_the_file_is_empty() -> None:
    content = json.loads((ROOT / "rocm_attn/machine/known_bad.json").read_bytes())
    assert all(row[name] for row in content["rows"] for name in row)


# ---- the doctor


def with_engine(name: str, version: str, machine: Machine = MI300, **environment: str) -> Machine:
    """Returns a machine that has an engine, too, and other variables."""
    engine = Distribution(name, version)
    there = {**machine.environment, **environment}
    return replace(machine, distributions=(*machine.distributions, engine), environment=there)


def reported(machine: Machine, *, at_build: bool = False) -> dict[str, Finding]:
    """Returns the doctor's findings from the table, by thread."""
    return {f.check.report: f for f in diagnose(machine, at_build=at_build) if f.check.id == "known-bad"}


def test_a_fault_that_needs_a_model_is_listed_and_no_warning() -> None:
    found = reported(with_engine("vllm", "0.23.0+rocm721"))["vllm-project/vllm#45562"]
    assert found.severity is Severity.SKIPPED
    assert found.verdict.found.startswith(
        "this will fail later (wrong output) with MiniMaxM3SparseForConditionalGeneration or MiniMaxM3VLForCausalLM, "
        "an FP8 KV cache, because vllm-project/vllm#45562 says of vllm from 0.22.1 in development and before 0.24.0: "
    )
    assert found.verdict.found.endswith("; use vllm 0.24.0 or later; or --kv-cache-dtype auto")


def test_a_fault_of_these_releases_alone_is_a_problem_or_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is the last bad release known, it is a problem, else a warning; so is one that costs time alone."""
    always = {"releases": {"vllm": ["0.30.0", "0.32.0"]}}
    rows = [
        {**GOOD, **always, "thread": "a/fixed#1"},
        {**GOOD, **always, "thread": "a/slow#2", "effect": "slow"},
        {**GOOD, "releases": {"vllm": ["0.30.0", ""]}, "thread": "an/open#3"},
        {**GOOD, **always, "thread": "another/gpu#4", "archs": ["gfx950"]},
        {**GOOD, **always, "thread": "a/switch#5", "environment": {"VLLM_ROCM_USE_AITER": "not 0"}},
    ]
    monkeypatch.setattr(table, "known_bad", lambda: tuple(map(row_of, rows)))
    machine = with_engine("vllm", "0.31.0", VLLM_ROCM_USE_AITER="0")
    found = {thread: finding.severity for thread, finding in reported(machine).items()}
    assert found == {"a/fixed#1": Severity.PROBLEM, "a/slow#2": Severity.WARNING, "an/open#3": Severity.WARNING}
    (fixed,) = (finding for thread, finding in reported(machine).items() if thread == "a/fixed#1")
    assert fixed.verdict.fix == "use vllm 0.32.0 or later"
    assert not reported(with_engine("vllm", "0.32.0", VLLM_ROCM_USE_AITER="0")).keys() - {"an/open#3"}


def test_a_switch_that_avoids_a_fault_ends_its_report() -> None:
    thread = "sgl-project/sglang#36541"
    assert thread in reported(with_engine("sglang", "0.5.19"))
    assert thread not in reported(with_engine("sglang", "0.5.19", SGLANG_AITER_UNIFIED_DRAFT_EXTEND="0"))


def test_an_engine_that_does_not_use_aiter_has_no_faults_of_it() -> None:
    thread = "vllm-project/vllm#47276"
    assert thread in reported(with_engine("vllm", "0.26.0", VLLM_ROCM_USE_AITER="1"))
    assert thread not in reported(with_engine("vllm", "0.26.0"))


def test_while_an_image_is_built_every_gpu_may_come() -> None:
    builder = with_engine("vllm", "0.31.0", replace(MI300, amd_gpus=()))
    assert "a gfx950" in reported(builder, at_build=True)["vllm-project/vllm#54359"].verdict.found
    assert "vllm-project/vllm#54359" not in reported(with_engine("vllm", "0.31.0"))


@pytest.mark.parametrize("machine", [CPU_ONLY, H200])
def test_other_machines_are_not_asked(machine: Machine) -> None:
    assert not reported(with_engine("vllm", "0.31.0", machine))


def test_the_facts_of_an_installation_are_its_releases_gpus_and_variables() -> None:
    facts = known_faults.facts_of(with_engine("sglang", "0.5.23"))
    named = {component: str(release) for component, release in facts.releases.items() if release is not None}
    assert named == {"sglang": "0.5.23", "aiter": "0.1.20", "triton": "3.6.0", "rocm": "7.2.4"}
    assert set(facts.releases) == set(COMPONENTS)
    assert (facts.archs, facts.model, facts.features) == (frozenset({"gfx942"}), None, {})
    assert facts.environment == MI300.environment
