"""`rocm-attn cycles`: clocks of the hot loop of compiled kernels, and its work for the bytes that it loads."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rocm_attn.errors import BadSetting
from rocm_lab.cycles.count import LoopCount, count_loop, waves_of
from rocm_lab.cycles.traffic import LoopTraffic, loop_traffic
from rocm_lab.simulator.faults import UnknownInstruction
from rocm_lab.waits.objects import OBJDUMPS, CodeKernel, files_of, kernels_of


@dataclass(frozen=True, slots=True)
class CountedKernel:
    """A kernel of a file, its count, or None if no loop has matrix instructions, and its traffic (loop_traffic)."""

    kernel: CodeKernel
    count: LoopCount | None
    traffic: LoopTraffic | None

    def line(self) -> str:
        """The count in one line."""
        head = f"{self.kernel.arch} {self.kernel.assembly.name}:"
        if self.count is None:
            return f"{head} no loop with matrix instructions"
        count = self.count
        return (
            f"{head} {count.clocks:,.0f} clocks an iteration of {count.waves} waves a SIMD, {count.share:.1%} of the "
            f"matrix units' ceiling (matrix {count.matrix:,}, vector {count.vector:,}, LDS {count.local_memory:,}, "
            f"loads {count.vector_memory:,}){self._of_kib()}"
        )

    def _of_kib(self) -> str:
        each = self.traffic
        if each is None:
            return ""
        return (
            f"; for a KiB that a wave loads {each.of_kib(each.instructions):.1f} instructions, "
            f"{each.of_kib(each.matrix):.1f} of them matrix ones, {each.of_kib(each.waits):.2f} waits, "
            f"{each.of_kib(each.barriers):.2f} barriers and {each.of_kib(each.lds_bytes):.0f} bytes of LDS; up to "
            f"{each.in_flight:,} bytes of a wave in flight"
        )


def run(options: argparse.Namespace) -> None:
    """Prints a line for each kernel. Raises BadSetting for bad files."""
    waves = waves_of(options.waves, options.num_warps)
    objdumps = (options.objdump,) if options.objdump else OBJDUMPS
    counted = [each for path in files_of(map(Path, options.files)) for each in _counted(path, objdumps, *waves)]
    if options.json:
        found = [
            {
                "path": str(each.kernel.path),
                "sha256": each.kernel.sha256,
                "arch": each.kernel.arch,
                "kernel": each.kernel.assembly.name,
                "count": {**asdict(each.count), "share": each.count.share} if each.count else None,
                "traffic": asdict(each.traffic) if each.traffic else None,
            }
            for each in counted
        ]
        print(json.dumps({"kernels": found}, indent=2))
    else:
        print("\n".join(each.line() for each in counted))


def _counted(path: Path, objdumps: Sequence[str], waves: int, of_program: int) -> list[CountedKernel]:
    try:
        return [
            CountedKernel(each, count_loop(each.assembly, each.arch, waves, of_program), loop_traffic(each.assembly))
            for each in kernels_of(path, objdumps)
        ]
    except UnknownInstruction as unknown:
        raise BadSetting(f"the loops of {path} cannot be counted ({unknown}); leave this file out") from unknown
