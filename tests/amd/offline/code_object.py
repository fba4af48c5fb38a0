"""The cost of a compiled kernel, read without any vendor's tool chain except the one inside Triton's wheel.

AMD: the assembly that Triton's own assembler turns into the hsaco. NVIDIA: cuobjdump, which Triton's wheel brings,
prints the resources of a cubin, and nvdisasm which registers its instructions read and write.
"""

import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass

from triton import knobs
from triton.compiler import CompiledKernel

from rocm_lab.simulator.code_figures import CodeFigures, only_match
from tests.amd.offline.nvidia_code import PRODUCTS, Code, machine_code
from tests.amd.offline.unwritten_registers import unwritten_registers
from tests.amd.offline.warpgroup_products import touched_while_running


@dataclass(frozen=True, slots=True)
class AmdCode(CodeFigures):
    """The resources of a kernel compiled for an AMD arch.

    waves_asked: waves_per_eu of the launch; 0: none
    has_dot:     true if the source has a matrix product
    """

    waves_asked: int
    has_dot: bool


@dataclass(frozen=True, slots=True)
class NvidiaCode:
    """The resources of a kernel compiled for an NVIDIA arch.

    registers:     registers of a thread
    stack_bytes:   stack of a thread; ptxas spills registers there
    local_bytes:   other thread-local memory
    shared_bytes:  shared memory of a program
    matrix_ops:    wgmma and mma instructions
    has_dot:       true if the source has a matrix product
    touched:       instructions that touch registers of a running wgmma (warpgroup_products.py)
    unwritten:     reads of registers that nothing has written (unwritten_registers.py)
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    matrix_ops: int
    has_dot: bool
    touched: tuple[str, ...]
    unwritten: tuple[str, ...]


def read_amd_code(compiled: CompiledKernel) -> AmdCode:
    """Returns the resources of a kernel compiled for hip. Raises ValueError if the assembly does not state one."""
    metadata = compiled.metadata
    figures = CodeFigures.of(compiled.asm["amdgcn"], metadata.target.arch, metadata.shared, metadata.num_warps)
    return AmdCode(**asdict(figures), waves_asked=metadata.waves_per_eu, has_dot=_has_dot(compiled))


def read_nvidia_code(compiled: CompiledKernel) -> NvidiaCode:
    """Returns the resources of a kernel compiled for cuda. Raises ValueError if a tool does not state one."""
    report = _resource_usage(compiled)
    # nvdisasm of CUDA 13 says nothing of registers in code for older GPUs.
    code = machine_code(compiled) if compiled.metadata.target.arch >= 90 else None
    has_warpgroup_products = "wgmma.mma_async" in compiled.asm["ptx"]
    return NvidiaCode(
        registers=int(only_match(r"\bREG:(\d+)", report)),
        stack_bytes=int(only_match(r"\bSTACK:(\d+)", report)),
        local_bytes=int(only_match(r"\bLOCAL:(\d+)", report)),
        shared_bytes=compiled.metadata.shared,
        matrix_ops=len(re.findall(r"(?m)^\s+(?:@\S+\s+)?(?:wgmma\.mma_async|mma)\.", compiled.asm["ptx"])),
        has_dot=_has_dot(compiled),
        touched=_touched(code) if code is not None and has_warpgroup_products else (),
        unwritten=tuple(unwritten_registers(code)) if code is not None else (),
    )


def _touched(code: Code) -> tuple[str, ...]:
    """Returns accesses to running products, of code that has products. Raises ValueError if no product is found."""
    opcodes = {each.opcode for each in code.steps}
    if not any(opcode.startswith(PRODUCTS) for opcode in opcodes) or "WARPGROUP.DEPBAR.LE" not in opcodes:
        raise ValueError(
            f"nvdisasm lists none of {PRODUCTS} and no wait for it, where PTX has wgmma; it lists {len(code.steps)} "
            "instructions"
        )
    return tuple(touched_while_running(code))


def _resource_usage(compiled: CompiledKernel) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        return subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout


def _has_dot(compiled: CompiledKernel) -> bool:
    # A kernel in Gluon has no source but the second.
    source = compiled.asm["ttir" if "ttir" in compiled.asm else "ttgir"]
    return re.search(r"\btt\.dot(_scaled)?\b|\bttng\.warp_group_dot\b", source) is not None
