"""A list of what a report shows to be otherwise than the simulator or the compiler's figures say.

test       it failed on the GPU, and the simulator executes its kernels and calls them right
result     a small step whose output has another error than the simulator's, from the same code and inputs
tiles      a candidate that gives wrong results
registers, scratch, waves
           the driver's figures of a kernel differ from those that its assembly states
"""

import base64
import binascii
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rocm_attn.errors import BadSetting
from rocm_attn.watch.evidence import StepEvidence
from rocm_lab.first_run.report import GpuReport, ReportedKernel, ReportedTest
from rocm_lab.simulator.evidence import judge, output_of
from rocm_lab.simulator.faults import SimulationFault, UnknownInstruction

# Every kernel there is executed by the tests of the simulator, on both archs.
_SIMULATED = "rocm_attn.kernels."
# Errors that differ by a smaller part of the bound are roundings inside of matrix units, of exp2 and of reciprocals.
_SAME_ERROR = 0.1
_SIMDS_PER_CU = 4


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """A difference. kind: see above; subject: test, kernel or layer; expected, found: in words"""

    kind: str
    subject: str
    expected: str
    found: str

    def line(self) -> str:
        """The difference in a line."""
        return f"{self.kind}: {self.subject}: expected {self.expected}; found {self.found}"


def discrepancies(report: GpuReport, objdumps: Sequence[str]) -> list[Discrepancy]:
    """All differences of a report. objdumps: commands that may disassemble. Raises BadSetting for a damaged one."""
    return [
        *_of_tests(report),
        *(each for test, packed in report.measured("evidence") for each in _of_evidence(test, packed, objdumps)),
        *_of_tiles(report),
        *_of_kernels(report),
    ]


def _of_tests(report: GpuReport) -> Iterator[Discrepancy]:
    for test in report.failed:
        simulated = [name.rpartition(":")[2] for name in test.kernels if name.startswith(_SIMULATED)]
        if simulated:
            yield Discrepancy(
                "test", test.name, f"{', '.join(simulated)} to be right, as in the simulator", "a failure"
            )


def _of_evidence(test: ReportedTest, packed: object, objdumps: Sequence[str]) -> Iterator[Discrepancy]:
    with tempfile.NamedTemporaryFile(suffix=".evidence") as file:
        try:
            file.write(zlib.decompress(base64.b64decode(str(packed), validate=True)))
        except (binascii.Error, zlib.error) as error:
            raise BadSetting(f"the evidence of {test.name} is damaged ({error})") from error
        file.flush()
        path = Path(file.name)
        evidence = StepEvidence.read(path)
        kernels = ", ".join(dict.fromkeys(launch.name for launch in evidence.launches))
        subject, of_gpu = f"{test.name}, {kernels}", evidence.error(evidence.recorded)
        try:
            out = output_of(evidence, objdumps)
        except BadSetting as missing:  # code of another LLVM is disassembled
            yield Discrepancy("result", subject, "the simulator's error", f"not compared: {missing}")
            return
        except (SimulationFault, UnknownInstruction) as fault:
            yield Discrepancy(
                "result", subject, f"{of_gpu:.2g} of the bound, as the GPU has", f"the simulator ends: {fault}"
            )
            return
        of_simulator = evidence.error(out)
        if of_gpu > 1:
            cause = judge(evidence, path, objdumps).cause.value
            yield Discrepancy(
                "result", subject, f"{of_simulator:.2g} of the bound", f"{of_gpu:.2g}; the cause: {cause}"
            )
        elif not abs(of_gpu - of_simulator) <= _SAME_ERROR:
            yield Discrepancy("result", subject, f"{of_simulator:.2g} of the bound", f"{of_gpu:.2g}")
        elif not torch.equal(*(each.nan_to_num() for each in (evidence.recorded, evidence.again))):
            yield Discrepancy("result", subject, "the same bits from the same inputs", "other bits in a second run")


def _of_tiles(report: GpuReport) -> Iterator[Discrepancy]:
    for test, trials in report.measured("tile trials"):
        try:
            yield from [found for trial in trials for found in _of_trial(trial)]
        except (AttributeError, KeyError, TypeError) as error:
            raise BadSetting(f"the trials of {test.name} are damaged ({type(error).__name__}: {error})") from error


def _of_trial(trial: Mapping[str, Any]) -> Iterator[Discrepancy]:
    in_use = trial["in_use"]["tiles"]
    for each in trial["candidates"]:
        if str(each["wrong"]).startswith("wrong"):
            changed = (f"{name} {value}" for name, value in each["tiles"].items() if in_use.get(name) != value)
            subject = f"{each['table']} with {', '.join(changed) or 'the tiles in use'}"
            yield Discrepancy("tiles", subject, "what the reference gives", each["wrong"])


def _of_kernels(report: GpuReport) -> Iterator[Discrepancy]:
    """A difference of each kernel once, however many variants have it."""
    variants = Counter(found for kernel in report.kernels for found in _of_driver(kernel))
    return (replace(found, subject=f"{found.subject}, {count} variants") for found, count in variants.items())


def _of_driver(kernel: ReportedKernel) -> Iterator[Discrepancy]:
    static, driver, name = kernel.static, kernel.driver, kernel.kernel.rpartition(":")[2]
    if driver.registers and static.vgprs != driver.registers:
        yield Discrepancy("registers", name, f"{static.vgprs}", f"{driver.registers}")
    if static.scratch_bytes != driver.scratch_bytes:
        yield Discrepancy("scratch", name, f"{static.scratch_bytes} bytes of a lane", f"{driver.scratch_bytes}")
    # Whole programs take room, so that of a program of eight waves on four SIMDs are an even number of waves.
    programs = static.waves_per_simd * _SIMDS_PER_CU // kernel.num_waves
    waves, stated = (max(1, each * kernel.num_waves // _SIMDS_PER_CU) for each in (programs, driver.programs_per_cu))
    if driver.programs_per_cu and waves != stated:
        yield Discrepancy("waves", name, f"{waves} of a SIMD", f"{stated}")
