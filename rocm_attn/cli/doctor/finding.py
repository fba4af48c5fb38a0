"""A check of the doctor, and its verdict."""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from rocm_attn.cli.doctor.machine import Machine


class Severity(enum.Enum):
    """A PROBLEM makes wrong results, a crash or a hang likely; a WARNING costs time or may become a problem later."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The verdict of one check on a machine, in sentences.

    found: what the check found
    fix:   what to do; empty if nothing needs to be done
    """

    severity: Severity
    found: str
    fix: str = ""

    def __post_init__(self) -> None:
        bad = self.severity in (Severity.WARNING, Severity.PROBLEM)
        assert bad == bool(self.fix), f"a verdict names a fix exactly where something is wrong: {self}"


def ok(found: str) -> Diagnosis:
    """A verdict: nothing is wrong."""
    return Diagnosis(Severity.OK, found)


def skipped(why: str) -> Diagnosis:
    """A verdict: the check does not apply to this machine."""
    return Diagnosis(Severity.SKIPPED, why)


def warning(found: str, fix: str) -> Diagnosis:
    """A verdict: something costs time or may become a problem later."""
    return Diagnosis(Severity.WARNING, found, fix)


def problem(found: str, fix: str) -> Diagnosis:
    """A verdict: something makes wrong results, a crash or a hang likely."""
    return Diagnosis(Severity.PROBLEM, found, fix)


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """A check for one known fault.

    looks_at:   what it checks, in words
    report:     issues that report it, by repository and number
    at_build:   True if it is meaningful while an image is built, when the GPUs of the later host are not known
    examine:    checks a machine
    """

    id: str
    looks_at: str
    report: str
    at_build: bool
    examine: Callable[[Machine], Diagnosis]


def machine_check(
    id: str, looks_at: str, report: str, *, at_build: bool = True
) -> Callable[[Callable[[Machine], Diagnosis]], MachineCheck]:
    """Makes a check of the function that examines a machine: see MachineCheck."""
    return lambda examine: MachineCheck(id, looks_at, report, at_build, examine)


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's verdict on a machine."""

    check: MachineCheck
    verdict: Diagnosis

    @property
    def severity(self) -> Severity:
        """The severity of the verdict."""
        return self.verdict.severity

    def as_dict(self) -> dict[str, str]:
        """The finding for JSON."""
        return {
            "id": self.check.id,
            "looks_at": self.check.looks_at,
            "severity": self.severity.value,
            "found": self.verdict.found,
            "fix": self.verdict.fix,
            "report": self.check.report,
        }
