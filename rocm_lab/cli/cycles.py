"""`rocm-attn cycles`: clocks of the hot loop of compiled kernels, and its work for the bytes that it loads."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rocm_lab.cycles.count import LoopCount, count_loop, waves_of
from rocm_lab.cycles.traffic import LoopTraffic, loop_traffic
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
    """Prints a line for each kernel. Raises BadSetting for bad files, UnknownInstruction for what cannot be read."""
    objdumps = (options.objdump,) if options.objdump else OBJDUMPS
    waves, of_program = waves_of(options.waves, options.num_warps)
    counted = [
        CountedKernel(
            kernel, count_loop(kernel.assembly, kernel.arch, waves, of_program), loop_traffic(kernel.assembly)
        )
        for path in files_of(map(Path, options.files))
        for kernel in kernels_of(path, objdumps)
    ]
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
