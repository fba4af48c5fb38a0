"""What a check is and what it says."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from rocm_attn.cli.doctor.machine import Machine


class Severity(enum.Enum):
    """A PROBLEM makes wrong results, a crash or a hang likely; a WARNING costs time or may bite later."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one check makes of a machine, in sentences.

    found: what there is
    fix:   what to do; empty where nothing needs to be done
    """

    severity: Severity
    found: str
    fix: str = ""

    def __post_init__(self) -> None:
        bad = self.severity in (Severity.WARNING, Severity.PROBLEM)
        assert bad == bool(self.fix), f"a verdict names a fix exactly where something is wrong: {self}"


def ok(found: str) -> Verdict:
    """Nothing is wrong."""
    return Verdict(Severity.OK, found)


def skipped(why: str) -> Verdict:
    """The check does not apply to this machine."""
    return Verdict(Severity.SKIPPED, why)


def warning(found: str, fix: str) -> Verdict:
    """Something that costs time or may bite later."""
    return Verdict(Severity.WARNING, found, fix)


def problem(found: str, fix: str) -> Verdict:
    """Something that makes wrong results, a crash or a hang likely."""
    return Verdict(Severity.PROBLEM, found, fix)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that is known to go wrong.

    looks_at:   what it looks at, in words
    report:     issues in which it was met, by repository and number
    at_build:   whether it means something while an image is built, where the GPUs of the later host are not known
    examine:    looks at a machine
    """

    id: str
    looks_at: str
    report: str
    at_build: bool
    examine: Callable[[Machine], Verdict]


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's verdict on a machine."""

    check: Check
    verdict: Verdict

    @property
    def severity(self) -> Severity:
        """The verdict's."""
        return self.verdict.severity

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return {
            "id": self.check.id,
            "looks_at": self.check.looks_at,
            "severity": self.severity.value,
            "found": self.verdict.found,
            "fix": self.verdict.fix,
            "report": self.check.report,
        }
