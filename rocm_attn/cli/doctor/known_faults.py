"""Faults of the installed releases that others have reported in public: the table of rocm_attn.machine.known_bad."""

from collections.abc import Iterator

from rocm_attn.cli.doctor.finding import Diagnosis, Finding, MachineCheck, problem, skipped, warning
from rocm_attn.cli.doctor.machine import Machine, release_name
from rocm_attn.cli.doctor.rocm_release import full_release
from rocm_attn.machine.distributions import TRITON_DISTRIBUTIONS
from rocm_attn.machine.known_bad import ENGINES, Facts, matching
from rocm_attn.machine.releases import Release

_DISTRIBUTIONS = {**{name: (name,) for name in ENGINES}, "aiter": ("amd-aiter",), "triton": TRITON_DISTRIBUTIONS}


def facts_of(machine: Machine) -> Facts:
    """The facts that an installation shows. They name no model and no option of an engine."""
    versions = {
        what: [v for name in names for v in machine.versions_of(name)] for what, names in _DISTRIBUTIONS.items()
    }
    versions["rocm"] = [release_name(rocm)] if (rocm := full_release(machine)) else []
    releases = {component: Release.of(found[0]) if found else None for component, found in versions.items()}
    return Facts(releases, frozenset(machine.amd_gpus) or None, environment=machine.environment)


def findings(machine: Machine) -> Iterator[Finding]:
    """Yields a finding for each row of the table that applies; SKIPPED if it needs a model or an option."""
    for row, needs in matching(facts_of(machine)) if machine.is_amd else ():
        # A release after the last one that was seen may be good.
        bad = problem if row.is_fixed and row.effect != "slow" else warning
        said = row.sentence(needs)
        yield _finding(row.thread, skipped(f"{said}; {row.fix}") if needs else bad(said, row.fix))


def _finding(thread: str, verdict: Diagnosis) -> Finding:
    # The id is the same for all rows: the thread tells them apart.
    return Finding(
        MachineCheck("known-bad", "known faults of these releases", thread, True, lambda _: verdict), verdict
    )
