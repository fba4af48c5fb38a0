"""Every check, in the order in which a reader can act on them, and their findings on a machine."""

from rocm_attn.cli.doctor import aiter_install, gpus, host, known_faults, rocm_libraries, rocm_release, triton_install
from rocm_attn.cli.doctor.finding import Finding, MachineCheck
from rocm_attn.cli.doctor.machine import Machine

# A module's checks follow each other as it defines them.
_MODULES = (gpus, rocm_release, rocm_libraries, triton_install, aiter_install, host)
CHECKS = tuple(each for module in _MODULES for each in vars(module).values() if isinstance(each, MachineCheck))


def diagnose(machine: Machine, *, at_build: bool = False) -> tuple[Finding, ...]:
    """The findings of all checks on a machine, or at_build of those that need no host; then its known faults."""
    checks = (check for check in CHECKS if check.at_build or not at_build)
    return (*(Finding(check, check.examine(machine)) for check in checks), *known_faults.findings(machine))
