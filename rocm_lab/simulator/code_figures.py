"""Registers, LDS and waves of a kernel, read from the assembly of its code object.

The assembly that Triton passes to its assembler ends with the metadata block that the loader reads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rocm_attn.machine.target import known_target

_SIMDS_PER_CU = 4


@dataclass(frozen=True, slots=True)
class CodeFigures:
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

    @classmethod
    def of(cls, assembly: str, arch: str, lds_bytes: int, num_waves: int) -> CodeFigures:
        """The resources that an assembly states. Raises ValueError if it does not state one.

        lds_bytes, num_waves: of a program; the assembly says 0, because Triton requests its LDS at launch
        """
        metadata = only_match(r"(?s)\.amdgpu_metadata\n(.*?)\.end_amdgpu_metadata", assembly)
        # The kernel's own, which follow its descriptor; functions have some too.
        info = only_match(r"(?ms)\.end_amdhsa_kernel$(.*?^; Occupancy: \d+)$", assembly)
        opcodes = re.findall(r"(?m)^\s+([a-z]+_[a-z0-9_]+)", assembly)

        def count(*prefixes: str) -> int:
            return sum(opcode.startswith(prefixes) for opcode in opcodes)

        def entry(name: str) -> int:
            return int(only_match(rf"(?m)^[ -]+\.{name}:\s+(\d+)$", metadata))

        waves = int(only_match(r"; Occupancy: (\d+)", info))
        if lds_bytes:
            programs = known_target(arch).lds_bytes // lds_bytes
            waves = max(1, min(waves, programs * num_waves // _SIMDS_PER_CU))
        return cls(
            vgprs=entry("vgpr_count"),
            agprs=entry("agpr_count"),
            sgprs=entry("sgpr_count"),
            vgpr_spills=entry("vgpr_spill_count"),
            sgpr_spills=entry("sgpr_spill_count"),
            scratch_bytes=entry("private_segment_fixed_size"),
            lds_bytes=lds_bytes,
            code_bytes=int(only_match(r"; codeLenInByte = (\d+)", info)),
            matrix_ops=count("v_mfma_", "v_smfmac_"),
            buffer_loads=count("buffer_load_"),
            global_loads=count("global_load_", "flat_load_"),
            waves_per_simd=waves,
        )


def only_match(pattern: str, text: str) -> str:
    """The one group of the one match of pattern."""
    found = re.findall(pattern, text)
    if len(found) != 1:
        raise ValueError(f"{len(found)} matches of {pattern!r}; expected one")
    return str(found[0])
