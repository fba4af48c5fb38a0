"""AITER's hand-written forward kernels, read from its code objects: the load of the hot loop on each unit.

They are the kernels whose speeds AMD has published; the cost model (rocm_lab/cost/cost.py) is calibrated on them.
llvm-objdump of the LLVM that brings llvm-mca disassembles them.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from rocm_lab.cost.static_figures import Busy
from tests.amd.offline.mca import SLOW, SLOW_CYCLES, find_llvm_mca
from tests.amd.offline.tile_cost import CYCLES_OF_MATRIX_OPS

# arch -> file in AITER's folder hsa/: the kernel of 128-element bfloat16 heads, rounding to nearest even, unmasked.
FORWARD = {
    "gfx942": "gfx942/fmha_v3_fwd/MI300/fwd_hd128_bf16_rtne.co",
    "gfx950": "gfx950/fmha_v3_fwd/fwd_hd128_bf16.co",
}
_LINE = re.compile(r"\t(\w+)(?: .*)?// ([0-9A-F]{12}): ([0-9A-F]{8})")
_PRODUCT = re.compile(r"v_mfma_f32_(\d+)x(\d+)x(\d+)_?(?:bf16|f16)")


def forward_loop(aiter: Path, arch: str) -> Busy:
    """The hot loop of the kernel of an arch. aiter: a checkout. Raises NoLlvmMca, FileNotFoundError."""
    tool = Path(find_llvm_mca()[0]).resolve().with_name("llvm-objdump")
    path = aiter / "hsa" / FORWARD[arch]
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; give a checkout of github.com/ROCm/aiter")
    shown = subprocess.run([tool, "-d", f"--mcpu={arch}", path], capture_output=True, text=True, check=True).stdout
    return hot_loop_of(shown, arch)


def hot_loop_of(disassembly: str, arch: str) -> Busy:
    """Returns the innermost loop with most products: from a backward branch's target to the branch."""
    lines = [
        (found[1], int(found[2], 16), int(found[3], 16))
        for found in map(_LINE.match, disassembly.splitlines())
        if found
    ]
    ranges = []
    for opcode, address, word in lines:
        if opcode.startswith(("s_cbranch", "s_branch")):
            jump = (word & 0xFFFF) - ((word & 0x8000) << 1)
            if jump < 0:
                ranges.append((address + 4 + 4 * jump, address))
    inner = [x for x in ranges if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in ranges)]
    loops = [[opcode for opcode, address, _ in lines if first <= address <= last] for first, last in inner]
    if not loops:
        raise ValueError("the code object has no loop")
    return max((_cycles(opcodes, arch) for opcodes in loops), key=lambda loop: loop.matrix)


def _cycles(opcodes: list[str], arch: str) -> Busy:
    matrix, vector = 0.0, 0.0
    for opcode in opcodes:
        if found := _PRODUCT.match(opcode):
            rows, columns, depth = map(int, found.groups())
            matrix += 2 * rows * columns * depth * CYCLES_OF_MATRIX_OPS[arch]
        elif opcode.startswith("v_"):
            vector += SLOW_CYCLES if SLOW.match(opcode) else 1
    return Busy(matrix, vector)
