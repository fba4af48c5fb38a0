"""The cause of a wrong result, from its evidence: the recorded code on the recorded inputs, on the simulator.

If the code gives a wrong result here too, software is at fault: the kernel if Triton's interpreter gives a wrong one
from the same source, else the compiler. If the code is right, it was run wrongly: a missing wait, if the check of waits
finds one, or the hardware, or a race between waves that the simulator's order does not show.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton._C.libtriton import llvm
from triton.backends.amd.compiler import HIPBackend

from rocm_attn.errors import RocmAttnError
from rocm_attn.kernels.noted_launches import kernel_named, of_plain
from rocm_attn.oracle.numerics import Bound, error_parts
from rocm_attn.watch.evidence import Place, RecordedLaunch, StepEvidence
from rocm_lab.simulator.assembly import Assembly, parse_assembly
from rocm_lab.simulator.faults import SimulationFault, UnknownInstruction
from rocm_lab.simulator.kernel import SimulatedKernel
from rocm_lab.simulator.launcher import Code, execute, simulated
from rocm_lab.waits.check import check_waits
from rocm_lab.waits.objects import OBJDUMPS, kernels_of

RIGHT, WRONG = "right", "wrong"
# Names of bfloat16 in constants of kernels.
_WIDER = {"bf16": "fp32", "bfloat16": "float32"}


class Cause(Enum):
    """Where a wrong result comes from."""

    NONE = "none: the recorded result is right"
    KERNEL = "the kernel"
    COMPILER = "the compiler"
    SOFTWARE = "the kernel or the compiler"
    WAIT = "a missing wait in the machine code"
    HARDWARE = "the hardware, or a race between waves"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A cause, and what it rests on, line by line."""

    cause: Cause
    lines: tuple[str, ...]


def judge(evidence: StepEvidence, path: Path, objdumps: Sequence[str] = OBJDUMPS) -> Judgement:
    """The cause of a wrong result. path: the file of the evidence, which Triton's interpreter reads in its own process

    Raises BadSetting for a code object that needs an llvm-objdump that is not there, UnknownInstruction.
    """
    if evidence.is_right(evidence.recorded):
        return Judgement(Cause.NONE, ())
    lines = [f"run again at once, its result was {_word(evidence, evidence.again)}"]
    codes = [_code(launch, objdumps) for launch in evidence.launches]
    try:
        out = _simulated(evidence, codes)
    except SimulationFault as fault:
        return _of_software(evidence, path, [*lines, f"on the simulator its code ends: {fault}"])
    lines.append(f"on the simulator its code gives a {_word(evidence, out)} result")
    if not evidence.is_right(out):
        ours, theirs = (evidence.compared(each).double() for each in (out, evidence.recorded))
        far = float(error_parts(ours.nan_to_num(), theirs.nan_to_num(), Bound(1.0, 0.0)).max())
        return _of_software(evidence, path, [*lines, f"which differs from the recorded one by {far:.2g} at most"])
    verdicts = [check_waits(assembly, code.arch) for code, assembly in codes]
    lines += [f"waits of {each.kernel}: {each.word.value}" for each in verdicts]
    faults = [fault.line() for each in verdicts for fault in each.faults]
    return Judgement(Cause.WAIT if faults else Cause.HARDWARE, (*lines, *faults))


def output_of(evidence: StepEvidence, objdumps: Sequence[str]) -> Tensor:
    """The output of the recorded code on the simulator.

    Raises SimulationFault, UnknownInstruction, and BadSetting for a code object that needs an llvm-objdump.
    """
    return _simulated(evidence, [_code(launch, objdumps) for launch in evidence.launches])


def _word(evidence: StepEvidence, out: Tensor) -> str:
    return RIGHT if evidence.is_right(out) else WRONG


def _code(launch: RecordedLaunch, objdumps: Sequence[str]) -> tuple[Code, Assembly]:
    """The recorded code: its assembly, if that makes the very code object, else the disassembly of the object."""
    assembly = parse_assembly(launch.assembly)
    llvm.init_targets()  # Triton before 3.9 assembles nothing in a process that has compiled nothing
    if HIPBackend.make_hsaco(launch.assembly, {}, SimpleNamespace(arch=launch.arch)) != launch.code:
        with tempfile.NamedTemporaryFile(suffix=".hsaco") as file:
            file.write(launch.code)
            file.flush()
            (found,) = [each.assembly for each in kernels_of(Path(file.name), objdumps)]
        # An object's descriptor and arguments are those of the text.
        assembly = replace(assembly, instructions=found.instructions, labels=found.labels)
    code = Code(
        launch.name,
        launch.arch,
        launch.sha256,
        launch.assembly,
        launch.lds_bytes,
        launch.num_waves,
        assembly.mnemonics,
    )
    return code, assembly


def _simulated(evidence: StepEvidence, codes: Sequence[tuple[Code, Assembly]]) -> Tensor:
    """The output of the recorded code."""
    storages = evidence.storages()
    for launch, (code, assembly) in zip(evidence.launches, codes, strict=True):
        values = {name: _value(given, storages) for name, given in launch.arguments.items()}
        arguments = {(name, kind): values.get(name) for name, kind in launch.types.items()}
        execute(SimulatedKernel(assembly, code.arch), code, launch.grid, arguments)
    return evidence.out.within(storages)


def _value(given: Mapping[str, Any], storages: Sequence[Tensor]) -> Any:
    """An argument of a launch; None for a constant that only the compiler needs."""
    if "place" in given:
        return Place(**given["place"]).within(storages)
    return given.get("plain")


def _of_software(evidence: StepEvidence, path: Path, lines: list[str]) -> Judgement:
    """Tells a kernel from its compiler: by the interpreter, else by the compiler that is installed."""
    command = [sys.executable, "-m", __name__, str(path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    word = done.stdout.strip()
    if done.returncode == 0:
        lines.append(f"Triton's interpreter gives a {word} result from its source")
        return Judgement(Cause.KERNEL if word == WRONG else Cause.COMPILER, tuple(lines))
    reason = (done.stderr.strip().splitlines() or ["no reason is known"])[-1]
    lines.append(f"Triton's interpreter does not run its source: {reason}")
    try:
        with simulated(evidence.launches[0].arch):
            out = run_source(evidence, evidence.storages())
    except (RocmAttnError, SimulationFault, UnknownInstruction, ImportError, AttributeError, ValueError) as error:
        lines.append(f"nor is it compiled here: {type(error).__name__}: {error}")
        return Judgement(Cause.SOFTWARE, tuple(lines))
    lines.append(f"compiled by the Triton that is installed here, it gives a {_word(evidence, out)} result")
    return Judgement(Cause.COMPILER if evidence.is_right(out) else Cause.SOFTWARE, tuple(lines))


def run_source(evidence: StepEvidence, storages: Sequence[Tensor]) -> Tensor:
    """The output of the kernels' sources, launched in the ordinary way.

    Raises ImportError and AttributeError for a kernel that is not here, ValueError for a constant that was not
    recorded.
    """
    for launch in evidence.launches:
        unknown = [f"{name} is a {each['unknown']}" for name, each in launch.arguments.items() if "unknown" in each]
        if unknown:
            raise ValueError(f"of {launch.name}, {unknown[0]}, which the evidence does not hold")
        values = {name: of_plain(_value(given, storages)) for name, given in launch.arguments.items()}
        kernel_named(launch.kernel)[launch.grid](**values, **launch.options)
    return evidence.out.within(storages)


def _without_bfloat16(evidence: StepEvidence, storages: Sequence[Tensor]) -> tuple[StepEvidence, list[Tensor]]:
    """The same with float32 in place of bfloat16, in which Triton's interpreter is wrong.

    Raises ValueError for memory that holds bfloat16 and something else.
    """
    kinds: dict[int, set[str]] = {}
    for launch in evidence.launches:
        for given in launch.arguments.values():
            if "place" in given:
                kinds.setdefault(given["place"]["storage"], set()).add(given["place"]["dtype"])
    wide = {number for number, names in kinds.items() if "bfloat16" in names}
    if mixed := [kinds[number] for number in wide if len(kinds[number]) > 1]:
        held = " and ".join(sorted(mixed[0]))
        raise ValueError(f"one storage holds {held}, and Triton's interpreter is wrong in bfloat16")

    def widened(value: Any) -> Any:
        if isinstance(value, dict) and value.get("storage") in wide:
            return {**value, "dtype": "float32"}
        if isinstance(value, dict):
            return {name: widened(each) for name, each in value.items()}
        if isinstance(value, list):
            return [widened(each) for each in value]
        return _WIDER.get(value, value) if isinstance(value, str) else value

    launches = [replace(each, arguments=widened(dict(each.arguments))) for each in evidence.launches]
    out = Place(**widened(asdict(evidence.out)))
    typed = [
        each.view(torch.bfloat16).float().view(torch.uint8) if number in wide else each
        for number, each in enumerate(storages)
    ]
    return replace(evidence, launches=launches, out=out), typed


def main(path: Path) -> None:
    """Prints whether the interpreter's result is right."""
    recorded = StepEvidence.read(path)
    evidence, storages = _without_bfloat16(recorded, recorded.storages())
    print(_word(evidence, run_source(evidence, storages)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
