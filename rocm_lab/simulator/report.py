"""The findings on each kernel that was simulated: what it takes, and what is proved of its code without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from rocm_lab.races.watch import Race
from rocm_lab.simulator.assembly import Assembly, parse_assembly
from rocm_lab.simulator.code_figures import CodeFigures
from rocm_lab.simulator.launcher import Code, SimulatedLaunch
from rocm_lab.waits.check import Word, check_waits

_HASH_CHARACTERS = 12


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict of a check of machine code, and what it rests on, line by line."""

    word: Word
    lines: tuple[str, ...]


def _waits(assembly: Assembly, arch: str) -> Finding:
    verdict = check_waits(assembly, arch)
    return Finding(verdict.word, (*(fault.line() for fault in verdict.faults), *verdict.reasons))


# The proofs about machine code, made without running it. A new check is a line here: each has a column in every report.
CHECKS: Mapping[str, Callable[[Assembly, str], Finding]] = {"waits": _waits}


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One variant of a kernel.

    launches:      that were simulated
    instructions:  executed by all waves of these launches
    findings:      of each check
    races:         of all variants of the kernel, that these launches showed, a line each
    """

    code: Code
    launches: int
    instructions: int
    figures: CodeFigures
    findings: Mapping[str, Finding]
    races: tuple[str, ...]

    @property
    def faults(self) -> list[str]:
        """A line for each race, and for each fault of each check."""
        faulty = {name: each for name, each in self.findings.items() if each.word is Word.FAULT}
        found = [f"{name}: {line}" for name, each in faulty.items() for line in each.lines]
        return [*found, *(f"race: {line}" for line in self.races)]

    def lines(self) -> list[str]:
        """Lines for people."""
        code, figures = self.code, self.figures
        spills = figures.vgpr_spills + figures.sgpr_spills
        words = [f"{name} {each.word.value}" for name, each in self.findings.items()]
        return [
            f"{code.sha256[:_HASH_CHARACTERS]} {code.arch} {code.kernel}: "
            + ", ".join(
                (
                    f"{self.launches} launch{'es' * (self.launches > 1)}",
                    f"{self.instructions} instructions",
                    f"{figures.vgprs} vector registers",
                    f"{figures.sgprs} scalar registers",
                    f"{figures.lds_bytes} bytes of LDS",
                    f"{figures.waves_per_simd} waves a SIMD",
                    f"{spills} spills",
                    *words,
                    f"{len(self.races)} races",
                )
            ),
            *(f"  {name}: {line}" for name, each in self.findings.items() for line in each.lines),
            *(f"  race: {line}" for line in self.races),
        ]

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "kernel": self.code.kernel,
            "sha256": self.code.sha256,
            "launches": self.launches,
            "instructions": self.instructions,
            "figures": asdict(self.figures),
            "checks": {
                **{name: each.word.value for name, each in self.findings.items()},
                "races": str(len(self.races)),
            },
            "faults": self.faults,
        }


def reports_of(launches: Iterable[SimulatedLaunch], races: Sequence[Race]) -> list[KernelReport]:
    """A report for each code that was launched, in order of its first launch. races: that a watch saw"""
    by_code: dict[Code, list[SimulatedLaunch]] = {}
    for launch in launches:
        by_code.setdefault(launch.code, []).append(launch)
    return [
        KernelReport(
            code,
            len(each),
            sum(launch.instructions for launch in each),
            *_of_code(code),
            tuple(race.line() for race in races if race.kernel == code.kernel),
        )
        for code, each in by_code.items()
    ]


@cache
def _of_code(code: Code) -> tuple[CodeFigures, Mapping[str, Finding]]:
    assembly = parse_assembly(code.text)
    findings = {name: check(assembly, code.arch) for name, check in CHECKS.items()}
    return CodeFigures.of(code.text, code.arch, code.lds_bytes, code.num_waves), findings
