"""KernelReport: a simulated kernel's instructions, registers and LDS, its loop's clocks, missing waits, and races."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from rocm_lab.cycles.count import count_loop, waves_of
from rocm_lab.races.watch import Race
from rocm_lab.simulator.assembly import parse_assembly
from rocm_lab.simulator.code_figures import CodeFigures
from rocm_lab.simulator.faults import UnknownInstruction
from rocm_lab.simulator.launcher import Code, SimulatedLaunch
from rocm_lab.waits.check import Verdict, check_waits

_HASH_CHARACTERS = 12


@dataclass(frozen=True, slots=True)
class KernelReport:
    """The findings on one compiled variant of a kernel.

    launches:      number of simulated launches
    instructions:  instructions executed by all waves of these launches
    loop_clocks:   counted clocks of an iteration of the loop with the most matrix instructions; None if none has any
    waits:         static check that the code waits for each result before it uses it
    races:         races in these launches, of all variants of the kernel, a line each
    """

    code: Code
    launches: int
    instructions: int
    figures: CodeFigures
    loop_clocks: float | None
    waits: Verdict
    races: tuple[str, ...]

    @property
    def faults(self) -> list[str]:
        """A line for each missing wait, and for each race."""
        return [*(f"waits: {fault.line()}" for fault in self.waits.faults), *(f"race: {line}" for line in self.races)]

    def lines(self) -> list[str]:
        """The report as lines of text."""
        code, figures = self.code, self.figures
        spills = figures.vgpr_spills + figures.sgpr_spills
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
                    *([] if self.loop_clocks is None else [f"{self.loop_clocks:,.0f} clocks an iteration"]),
                    f"waits {self.waits.word.value}",
                    f"{len(self.races)} races",
                )
            ),
            *(f"  waits: {fault.line()}" for fault in self.waits.faults),
            *(f"  waits: {reason}" for reason in self.waits.reasons),
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
            "loop_clocks": self.loop_clocks,
            "checks": {"waits": self.waits.word.value, "races": str(len(self.races))},
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
def _of_code(code: Code) -> tuple[CodeFigures, float | None, Verdict]:
    figures = CodeFigures.of(code.text, code.arch, code.lds_bytes, code.num_waves)
    assembly = parse_assembly(code.text)
    try:
        loop = count_loop(assembly, code.arch, *waves_of(figures.waves_per_simd, code.num_waves))
    except UnknownInstruction:  # of a path that was not executed; the verdict says which
        loop = None
    return figures, None if loop is None else loop.clocks, check_waits(assembly, code.arch)
