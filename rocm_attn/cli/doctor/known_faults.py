"""Faults of the installed releases that others have reported in public: the table of rocm_attn.machine.known_bad."""

from __future__ import annotations

from rocm_attn.cli.doctor.finding import Diagnosis, Finding, MachineCheck, problem, skipped, warning
from rocm_attn.cli.doctor.machine import Machine, release_name
from rocm_attn.cli.doctor.rocm_release import full_release
from rocm_attn.machine.distributions import TRITON_DISTRIBUTIONS
from rocm_attn.machine.known_bad import Facts, Match, matching
from rocm_attn.machine.releases import Release

_DISTRIBUTIONS = {
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "atom": ("atom",),
    "aiter": ("amd-aiter",),
    "triton": TRITON_DISTRIBUTIONS,
}


def facts_of(machine: Machine) -> Facts:
    """What the table asks for, as far as an installation shows it. No model is known, and no option of an engine."""
    releases: dict[str, Release | None] = {"rocm": None}
    for component, names in _DISTRIBUTIONS.items():
        versions = [version for name in names for version in machine.versions_of(name)]
        releases[component] = Release.of(versions[0]) if versions else None
    if rocm := full_release(machine):
        releases["rocm"] = Release.of(release_name(rocm))
    return Facts(releases, frozenset(machine.amd_gpus) or None, environment=machine.environment)


def findings(machine: Machine) -> tuple[Finding, ...]:
    """A finding for each row of the table that applies; SKIPPED if it needs a model or an option that is not known."""
    if not machine.is_amd:
        return ()
    return tuple(Finding(_check(match), _diagnosis(match)) for match in matching(facts_of(machine)))


def _check(match: Match) -> MachineCheck:
    # The id is the same for all rows: `report` tells them apart.
    return MachineCheck(
        "known-bad", "known faults of these releases", match.row.thread, True, lambda _: _diagnosis(match)
    )


def _diagnosis(match: Match) -> Diagnosis:
    if match.needs:
        return skipped(f"{match.sentence}; {match.remedy}")
    # A release after the last one that was seen may be good.
    bad = problem if match.row.is_fixed and match.row.effect != "slow" else warning
    return bad(match.sentence, match.remedy)
