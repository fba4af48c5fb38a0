"""Every check, in the order in which a reader can act on them, and their findings on a machine."""

from __future__ import annotations

from rocm_attn.cli.doctor import aiter_install, gpus, host, known_faults, rocm_libraries, rocm_release, triton_install
from rocm_attn.cli.doctor.finding import Finding, MachineCheck
from rocm_attn.cli.doctor.machine import Machine

CHECKS: tuple[MachineCheck, ...] = (
    *gpus.CHECKS,
    *rocm_release.CHECKS,
    *rocm_libraries.CHECKS,
    *triton_install.CHECKS,
    *aiter_install.CHECKS,
    *host.CHECKS,
)


def diagnose(machine: Machine, *, at_build: bool = False) -> tuple[Finding, ...]:
    """The findings of all checks on a machine, or at_build of those that need no host; then its known faults."""
    checks = (check for check in CHECKS if check.at_build or not at_build)
    return (*(Finding(check, check.examine(machine)) for check in checks), *known_faults.findings(machine))
