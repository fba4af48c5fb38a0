"""llvm-mca: the time of a loop for one wave, by LLVM's scheduling models of gfx942 and gfx950.

The models issue the instructions of one wave in order, know latencies and busy units, and follow s_waitcnt. They know
no other wave, no caches, no bank conflicts and no barrier's wait, and nothing was measured with them on hardware. They
do not know the latency of a load: here it is an unknown, and the time of a loop is linear in it.

The input of the tool is corrected in two ways. It takes a load with a 64-bit address for one of LDS too, which would
make the loop wait for it at the next access of LDS: each is read as a buffer load. And it takes exp2, reciprocals and
products of 32-bit integers for one instruction each, but a SIMD computes them at a quarter of the rate: each is read
with three more.

The tool is part of LLVM; it must be version 22 or newer, which knows gfx950 and annotated latencies. pip does not
install it. Debian has it in the package llvm-22; ROCM_ATTN_LLVM_MCA names one that is not on the path.
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
from typing import Any

from rocm_lab.cycles.loops import Loop
from tests.amd.offline.hot_loop import is_load

OLDEST_LLVM = 22
# The models count in steps in which a SIMD of 16 lanes issues one instruction for the 64 of a wave.
CLOCKS_PER_CYCLE = 4
_ITERATIONS = 20
_MATRIX_UNIT, _VECTOR_UNIT = "HWXDL", "HWVALU"
# Both far above what an iteration takes, so that every wait for a load is seen.
_LATENCIES = (1000, 2000)
# Processor seconds, which do not depend on how busy the machine is. It needs a twentieth of one, or never ends.
_MAX_CPU_SECONDS = 10
# llvm-mca 22 may stall for ever at an instruction of two micro-operations. Each of these becomes two instructions that
# read the same registers and write one of its two each.
_SWAP = re.compile(r"v_permlane\d+_swap_b32(?:_e\d+)? (v\d+), (v\d+)")
_FLAT_LOAD = re.compile(r"global_load_(lds_)?(\w+) (?:([av]\S+), )?(v\[\d+:\d+\]|v\d+), (?:off|s\[\d+:\d+\])")
# By AMD's CDNA3 instruction set a SIMD computes these at a quarter of the rate: "transcendental", and 32-bit products.
SLOW = re.compile(r"v_(?:exp|log|rcp|rsq|sqrt|sin|cos)_|v_mul_(?:lo|hi)_[iu]32")
SLOW_CYCLES = 4
_MAD_64 = re.compile(r"v_mad_u64_u32 v\[(\d+):(\d+)\], \S+, (\S+), (\S+), (?:([sv])\[(\d+):(\d+)\]|(\S+))")
_NAMES = ("llvm-mca", *(f"llvm-mca-{version}" for version in range(OLDEST_LLVM, OLDEST_LLVM + 8)))


class NoLlvmMca(RuntimeError):
    """No llvm-mca that knows these archs is installed."""


class Unfinished(RuntimeError):
    """llvm-mca does not finish a loop."""


@dataclass(frozen=True, slots=True)
class LoopCycles:
    """The time of one iteration for one wave, in cycles of the model.

    own:       from one iteration to the next, if loads were immediate
    latencies: latencies of a load, one after another, that are added
    issue:     busy cycles of the busiest unit; no number of waves on a SIMD makes it faster
    matrix:    cycles of the matrix unit
    vector:    cycles of the vector unit
    """

    own: float
    latencies: float
    issue: float
    matrix: float
    vector: float

    def alone(self, load_latency: float) -> float:
        """Returns the cycles from one iteration to the next, with loads of that latency."""
        return self.own + self.latencies * load_latency


def loop_cycles(loop: Loop, arch: str) -> LoopCycles:
    """The cycles of a loop. Raises NoLlvmMca and Unfinished."""
    tool, _ = find_llvm_mca()
    near, far = (_run(tool, arch, _annotated(loop, latency)) for latency in _LATENCIES)
    latencies = (_cycles(far) - _cycles(near)) / (_LATENCIES[1] - _LATENCIES[0])
    units = _units(near)
    return LoopCycles(
        own=_cycles(near) - latencies * _LATENCIES[0],
        latencies=latencies,
        issue=max(units.values()),
        matrix=units.get(_MATRIX_UNIT, 0.0),
        vector=units.get(_VECTOR_UNIT, 0.0),
    )


def _cycles(report: Any) -> float:
    """Returns the cycles from one iteration to the next."""
    cycles: int = report["CodeRegions"][0]["SummaryView"]["TotalCycles"]
    return cycles / _ITERATIONS


def _units(report: Any) -> dict[str, float]:
    """Returns unit -> busy cycles per iteration."""
    names = report["TargetInfo"]["Resources"]
    # The line after the last instruction has the sums of an iteration.
    pressure = report["CodeRegions"][0]["ResourcePressureView"]["ResourcePressureInfo"]
    last = max(entry["InstructionIndex"] for entry in pressure)
    sums = [entry for entry in pressure if entry["InstructionIndex"] == last]
    return {names[entry["ResourceIndex"]]: entry["ResourceUsage"] for entry in sums}


@functools.cache
def find_llvm_mca() -> tuple[str, int]:
    """The program and its LLVM's major version. Raises NoLlvmMca, which says how to get one."""
    named = os.environ.get("ROCM_ATTN_LLVM_MCA")
    seen = []
    for name in (named,) if named else _NAMES:
        path = shutil.which(name)
        if path is None:
            continue
        reported = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        version = re.search(r"LLVM version (\d+)", reported)
        if version and int(version[1]) >= OLDEST_LLVM:
            return path, int(version[1])
        seen.append(path)
    raise NoLlvmMca(
        f"llvm-mca of LLVM {OLDEST_LLVM} or newer was not found ({', '.join(seen) or 'none'} on the path); install it, "
        f"for instance apt-get install llvm-{OLDEST_LLVM}, or set ROCM_ATTN_LLVM_MCA"
    )


def _run(tool: str, arch: str, assembly: str) -> Any:
    """The tool's report."""
    command = [tool, "-mtriple=amdgcn-amd-amdhsa", f"-mcpu={arch}", f"-iterations={_ITERATIONS}", "--json"]
    ran = subprocess.run(command, input=assembly, capture_output=True, text=True, preexec_fn=_limit_cpu_time)
    if ran.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise Unfinished(f"llvm-mca was stopped after {_MAX_CPU_SECONDS} s of a processor in a loop for {arch}")
    if ran.returncode:
        raise ValueError(f"llvm-mca does not understand the loop: {ran.stderr[:2000]}")
    return json.loads(ran.stdout)


def _limit_cpu_time() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_SECONDS, _MAX_CPU_SECONDS))


def _annotated(loop: Loop, load_latency: int) -> str:
    return "\n".join(line for each in loop.body for line in _as_modelled(each.text, load_latency)) + "\n"


def _as_modelled(text: str, load_latency: int) -> list[str]:
    """The lines that stand for an instruction."""
    if is_load(text):
        return [f"; LLVM-MCA-LATENCY {load_latency}", _as_buffer_load(text), "; LLVM-MCA-LATENCY"]
    if found := _SWAP.match(text):
        first, second = found.groups()
        return [f"v_max_u32_e32 {name}, {first}, {second}" for name in (first, second)]
    if found := _MAD_64.match(text):
        low, high, x, y, kind, low_added, high_added, added = found.groups()
        addends = (added, added) if added else (f"{kind}{low_added}", f"{kind}{high_added}")
        halves = [
            f"v_mad_u32_u24 v{name}, {x}, {y}, {addend}" for name, addend in zip((low, high), addends, strict=True)
        ]
        return [*halves, *["v_nop"] * (SLOW_CYCLES - len(halves))]
    return [text, *["v_nop"] * ((SLOW_CYCLES - 1) if SLOW.match(text) else 0)]


def _as_buffer_load(text: str) -> str:
    """Returns a load with a 64-bit address as one with an offset of as many registers; others unchanged."""
    found = _FLAT_LOAD.match(text)
    if not found:
        return text
    to_lds, kind, destination, address = found.groups()
    registers = address if destination is None else f"{destination}, {address}"
    offset = "idxen offen" if ":" in address else "offen"
    return f"buffer_load_{kind} {registers}, s[0:3], 0 {offset}{' lds' if to_lds else ''}"
