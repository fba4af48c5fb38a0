"""`rocm-attn waits`: whether compiled kernels wait for what they use; by the hash of the code object."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rocm_attn.errors import RocmAttnError
from rocm_lab.simulator.faults import UnknownInstruction
from rocm_lab.waits.check import Verdict, Word, check_waits
from rocm_lab.waits.objects import OBJDUMPS, files_of, kernels_of

_HASH_CHARACTERS = 12


class Unwaited(RocmAttnError):
    """A kernel uses what it has not waited for."""


@dataclass(frozen=True, slots=True)
class CheckedKernel:
    """A verdict and the code object that it is about."""

    path: Path
    arch: str
    sha256: str
    verdict: Verdict

    def lines(self) -> list[str]:
        """Lines for people: the verdict, and what it rests on."""
        verdict = self.verdict
        head = f"{self.sha256[:_HASH_CHARACTERS]} {self.arch} {verdict.kernel}: {verdict.word.value}"
        return [head, *(f"  fault: {fault.line()}" for fault in verdict.faults), *(f"  {r}" for r in verdict.reasons)]

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        verdict = asdict(self.verdict)
        return {
            "sha256": self.sha256,
            "arch": self.arch,
            "path": str(self.path),
            "verdict": self.verdict.word.value,
            **verdict,
        }


def run(options: argparse.Namespace) -> None:
    """Prints a verdict for each kernel. Raises Unwaited after that if one has a fault, BadSetting for bad files."""
    objdumps = (options.objdump,) if options.objdump else OBJDUMPS
    checked = [each for path in files_of(map(Path, options.files)) for each in _checked(path, objdumps)]
    if options.json:
        print(json.dumps({"kernels": [each.as_json() for each in checked]}, indent=2))
    else:
        print("\n".join(line for each in checked for line in each.lines()))
    counts = Counter(each.verdict.word for each in checked)
    if not options.json:
        print(f"{len(checked)} kernels: {', '.join(f'{counts[word]} {word.value}' for word in Word if counts[word])}")
    if counts[Word.FAULT]:
        raise Unwaited(f"{counts[Word.FAULT]} of {len(checked)} kernels use what they have not waited for")


def _checked(path: Path, objdumps: Sequence[str]) -> list[CheckedKernel]:
    try:
        kernels = kernels_of(path, objdumps)
    except UnknownInstruction as unknown:
        return [CheckedKernel(path, "", "", Verdict(path.name, (), (str(unknown),)))]
    return [CheckedKernel(path, each.arch, each.sha256, check_waits(each.assembly, each.arch)) for each in kernels]
