"""llvm-mca: how long a wave takes for a loop by LLVM's scheduling models of gfx942 and gfx950.

The models issue the instructions of one wave in order, know latencies and the units that are taken, and follow
s_waitcnt. They know no other wave, no caches, no bank conflicts and no barrier's wait, and nothing was measured with
them on hardware. What a load takes is not theirs to know: it is given with the loop.

The tool is part of LLVM; it must be version 22 or newer, which knows gfx950 and annotated latencies. pip does not bring
it. Debian has it in the package llvm-22; ROCM_ATTN_LLVM_MCA names one that is not on the path.
"""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
from dataclasses import dataclass

from tests.amd.offline.hot_loop import HotLoop, is_load

OLDEST_LLVM = 22
# The models count in steps in which a SIMD of 16 lanes issues one instruction for the 64 of a wave.
CLOCKS_PER_CYCLE = 4
_ITERATIONS = 40
# Of a processor, which a busy machine does not change. It needs a twentieth of one, or never ends.
_MAX_CPU_SECONDS = 10
# llvm-mca 22 may stall for ever at an instruction of two micro-operations. Each of these becomes two instructions that
# read the same registers and write one of its two each.
_SWAP = re.compile(r"v_permlane\d+_swap_b32(?:_e\d+)? (v\d+), (v\d+)")
_MAD_64 = re.compile(r"v_mad_u64_u32 v\[(\d+):(\d+)\], \S+, (\S+), (\S+), (?:([sv])\[(\d+):(\d+)\]|(\S+))")
_NAMES = ("llvm-mca", *(f"llvm-mca-{version}" for version in range(OLDEST_LLVM, OLDEST_LLVM + 8)))


class NoLlvmMca(RuntimeError):
    """There is no llvm-mca that knows these archs."""


class Unfinished(RuntimeError):
    """llvm-mca does not come to an end with a loop."""


@dataclass(frozen=True, slots=True)
class LoopCycles:
    """What one iteration takes one wave, in cycles of the model.

    alone: from one iteration to the next, waits included
    issue: cycles that the busiest unit is taken; no number of waves on a SIMD makes it faster
    """

    alone: float
    issue: float


def loop_cycles(loop: HotLoop, arch: str, load_latency: int) -> LoopCycles:
    """The cycles of a loop whose loads take load_latency cycles. Raises NoLlvmMca and Unfinished."""
    tool, _ = find_llvm_mca()
    report = _run(tool, arch, _annotated(loop, load_latency))
    (region,) = json.loads(report)["CodeRegions"]
    # The line after the last instruction has the sums of an iteration.
    pressure = region["ResourcePressureView"]["ResourcePressureInfo"]
    last = max(entry["InstructionIndex"] for entry in pressure)
    usage = [entry["ResourceUsage"] for entry in pressure if entry["InstructionIndex"] == last]
    return LoopCycles(alone=region["SummaryView"]["TotalCycles"] / _ITERATIONS, issue=max(usage))


@functools.cache
def find_llvm_mca() -> tuple[str, int]:
    """The program and its LLVM's major version. Raises NoLlvmMca, which says how to get one."""
    named = os.environ.get("ROCM_ATTN_LLVM_MCA")
    seen = []
    for name in (named,) if named else _NAMES:
        path = shutil.which(name)
        if path is None:
            continue
        told = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        version = re.search(r"LLVM version (\d+)", told)
        if version and int(version[1]) >= OLDEST_LLVM:
            return path, int(version[1])
        seen.append(path)
    raise NoLlvmMca(
        f"llvm-mca of LLVM {OLDEST_LLVM} or newer was not found ({', '.join(seen) or 'none'} on the path); install it, "
        f"for instance apt-get install llvm-{OLDEST_LLVM}, or set ROCM_ATTN_LLVM_MCA"
    )


def _run(tool: str, arch: str, assembly: str) -> str:
    command = [tool, "-mtriple=amdgcn-amd-amdhsa", f"-mcpu={arch}", f"-iterations={_ITERATIONS}", "--json"]
    ran = subprocess.run(command, input=assembly, capture_output=True, text=True, preexec_fn=_limit_cpu_time)
    if ran.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise Unfinished(f"llvm-mca was stopped after {_MAX_CPU_SECONDS} s of a processor in a loop for {arch}")
    if ran.returncode:
        raise ValueError(f"llvm-mca does not understand the loop: {ran.stderr[:2000]}")
    return ran.stdout


def _limit_cpu_time() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_SECONDS, _MAX_CPU_SECONDS))


def _annotated(loop: HotLoop, load_latency: int) -> str:
    lines = []
    for text in loop.instructions:
        if is_load(text):
            lines += [f"; LLVM-MCA-LATENCY {load_latency}", text, "; LLVM-MCA-LATENCY"]
        elif found := _SWAP.match(text):
            first, second = found.groups()
            lines += [f"v_max_u32_e32 {name}, {first}, {second}" for name in (first, second)]
        elif found := _MAD_64.match(text):
            low, high, x, y, kind, low_added, high_added, added = found.groups()
            addends = (added, added) if added else (f"{kind}{low_added}", f"{kind}{high_added}")
            lines += [
                f"v_mad_u32_u24 v{name}, {x}, {y}, {addend}" for name, addend in zip((low, high), addends, strict=True)
            ]
        else:
            lines.append(text)
    return "\n".join(lines) + "\n"
