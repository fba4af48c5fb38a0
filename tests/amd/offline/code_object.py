"""The cost of a compiled kernel, read without any vendor's tool chain except the one inside Triton's wheel.

AMD: the assembly that Triton's own assembler turns into the hsaco; it ends with the metadata block that the loader
reads. NVIDIA: cuobjdump, which Triton's wheel brings, prints the resources of a cubin.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass

from triton import knobs
from triton.compiler import CompiledKernel

from rocm_attn.machine.target import known_target
from tests.amd.offline.warpgroup_products import Instruction, instructions, touched_while_running

_SIMDS_PER_CU = 4


@dataclass(frozen=True, slots=True)
class AmdCode:
    """The resources of a kernel compiled for an AMD arch.

    vgprs, agprs:    vector registers of a lane; agprs are part of vgprs on gfx942 and gfx950
    sgprs:           scalar registers of a wave
    vgpr_spills:     vector registers spilled to memory
    sgpr_spills:     scalar registers spilled, to vector registers or to memory
    scratch_bytes:   private memory of a lane: spills and arrays that are indexed at run time
    lds_bytes:       LDS of a program
    code_bytes:      size of the machine code
    matrix_ops:      v_mfma and v_smfmac instructions
    buffer_loads:    loads with a 32-bit offset from a resource descriptor
    global_loads:    loads with a 64-bit address
    waves_per_simd:  waves that a SIMD has room for, by registers and LDS
    waves_asked:     waves_per_eu of the launch; 0: none
    has_dot:         true if the source has a matrix product
    """

    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    code_bytes: int
    matrix_ops: int
    buffer_loads: int
    global_loads: int
    waves_per_simd: int
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
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    matrix_ops: int
    has_dot: bool
    touched: tuple[str, ...]


def read_amd_code(compiled: CompiledKernel) -> AmdCode:
    """Returns the resources of a kernel compiled for hip. Raises ValueError if the assembly does not state one."""
    assembly: str = compiled.asm["amdgcn"]
    metadata = _only(r"(?s)\.amdgpu_metadata\n(.*?)\.end_amdgpu_metadata", assembly)
    opcodes = re.findall(r"(?m)^\s+([a-z]+_[a-z0-9_]+)", assembly)

    def count(*prefixes: str) -> int:
        return sum(opcode.startswith(prefixes) for opcode in opcodes)

    def entry(name: str) -> int:
        return int(_only(rf"(?m)^[ -]+\.{name}:\s+(\d+)$", metadata))

    return AmdCode(
        vgprs=entry("vgpr_count"),
        agprs=entry("agpr_count"),
        sgprs=entry("sgpr_count"),
        vgpr_spills=entry("vgpr_spill_count"),
        sgpr_spills=entry("sgpr_spill_count"),
        scratch_bytes=entry("private_segment_fixed_size"),
        # The assembly says 0: Triton requests its LDS at launch.
        lds_bytes=compiled.metadata.shared,
        code_bytes=int(_only(r"; codeLenInByte = (\d+)", assembly)),
        matrix_ops=count("v_mfma_", "v_smfmac_"),
        buffer_loads=count("buffer_load_"),
        global_loads=count("global_load_", "flat_load_"),
        waves_per_simd=_waves_per_simd(compiled, int(_only(r"; Occupancy: (\d+)", assembly))),
        waves_asked=compiled.metadata.waves_per_eu,
        has_dot=_has_dot(compiled),
    )


def read_nvidia_code(compiled: CompiledKernel) -> NvidiaCode:
    """Returns the resources of a kernel compiled for cuda. Raises ValueError if cuobjdump does not state one."""
    report = _cuobjdump(compiled, "-res-usage")
    has_warpgroup_products = "wgmma.mma_async" in compiled.asm["ptx"]
    return NvidiaCode(
        registers=int(_only(r"\bREG:(\d+)", report)),
        stack_bytes=int(_only(r"\bSTACK:(\d+)", report)),
        local_bytes=int(_only(r"\bLOCAL:(\d+)", report)),
        shared_bytes=compiled.metadata.shared,
        matrix_ops=len(re.findall(r"(?m)^\s+(?:@\S+\s+)?(?:wgmma\.mma_async|mma)\.", compiled.asm["ptx"])),
        has_dot=_has_dot(compiled),
        touched=_touched(machine_code(compiled)) if has_warpgroup_products else (),
    )


def _touched(code: list[Instruction]) -> tuple[str, ...]:
    """Returns accesses to running products, of code that has products. Raises ValueError if no product is found."""
    opcodes = {each.opcode for each in code}
    if not any(opcode.startswith("HGMMA") for opcode in opcodes) or "WARPGROUP.DEPBAR.LE" not in opcodes:
        raise ValueError(
            f"cuobjdump lists no HGMMA and no wait for it, where PTX has wgmma; it lists {len(code)} lines"
        )
    return tuple(touched_while_running(code))


def machine_code(compiled: CompiledKernel) -> list[Instruction]:
    """The instructions of a kernel compiled for cuda."""
    return instructions(_cuobjdump(compiled, "-sass"))


def _cuobjdump(compiled: CompiledKernel, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        return subprocess.run(
            [knobs.nvidia.cuobjdump.path, what, cubin.name], capture_output=True, text=True, check=True
        ).stdout


def _waves_per_simd(compiled: CompiledKernel, by_registers: int) -> int:
    """Returns by_registers, as LLVM states it, or fewer if the LDS of a CU has no room for that many programs."""
    metadata = compiled.metadata
    if not metadata.shared:
        return by_registers
    programs: int = known_target(metadata.target.arch).lds_bytes // metadata.shared
    by_lds: int = programs * metadata.num_warps // _SIMDS_PER_CU
    return max(1, min(by_registers, by_lds))


def _has_dot(compiled: CompiledKernel) -> bool:
    # A kernel in Gluon has no source but the second.
    source = compiled.asm["ttir" if "ttir" in compiled.asm else "ttgir"]
    return re.search(r"\btt\.dot(_scaled)?\b|\bttng\.warp_group_dot\b", source) is not None


def _only(pattern: str, text: str) -> str:
    """The one group of the one match of pattern."""
    found = re.findall(pattern, text)
    if len(found) != 1:
        raise ValueError(f"{len(found)} matches of {pattern!r}; expected one")
    return str(found[0])
