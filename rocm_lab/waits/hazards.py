"""No-ops that hardware does not insert itself: the wait states that must lie between two instructions.

Where a row of ROWS applies, hardware has no interlock, and the ISA documents ask for the wait states: "AMD Instinct
MI300 Instruction Set Architecture" (CDNA3) and "AMD Instinct CDNA4 Instruction Set Architecture", section 4.5 "Manually
Inserted Wait States (NOPs)" and, for matrix instructions, section 7 "Dependency Resolution: Required Independent
Instructions". Each row names the function of LLVM's GCNHazardRecognizer.cpp that inserts them. An instruction is one
wait state, s_nop N is N + 1 of them.

Matrix instructions resolve one dependency themselves: source C in exactly the registers that the previous one writes.
All others need as many states as the first instruction has passes, and some more.

Not checked, because no kernel that Triton compiles has them: products in float64 and v_dot (instructions that the
simulator does not know, which are refused), EXECZ and VCCZ as operands, s_movrel, s_getreg, s_setvskip, export, GDS,
s_sendmsg. Two different matrix instructions on one accumulator are taken as LLVM 22 takes them, without wait states
(llvm/llvm-project#218363 is open and asks for some).

M0, written by a scalar instruction, needs a wait state before "scratch or global with LDS = 1" (ISA, table 11). The
table does not name buffer loads with LDS = 1, and AITER's assembly for gfx942 has none before them, so the row is not
about them. LLVM's checkReadM0Hazards inserts one there too.

A scalar register, written by a vector instruction, needs 2 wait states before another "reads SGPR as constant" and 0
before one "reads SGPR as carry-in" (ISA, table 11). LLVM's checkVALUHazards inserts 2 before both. The row is the
table's. v_cndmask, which the table does not name, reads its mask as v_addc reads its carry, a bit for each lane;
AITER's assembly for gfx942 has none between v_cmp and v_cndmask.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from rocm_lab.simulator.assembly import Instruction
from rocm_lab.simulator.faults import UnknownInstruction
from rocm_lab.waits.effects import Effects, Unit, effects_of, writes_a_part
from rocm_lab.waits.registers import EXEC_BITS, M0_BITS, MODE, SCALARS, VCC_BITS, VECTORS

# The most wait states that any row asks for: 16 passes and 4 more.
MOST_STATES = 20

# Passes of a matrix instruction, 4 cycles each: CDNA3 and CDNA4 ISA, tables of section 7; LLVM's SISchedule.td. Those
# of "f8f6f4" are for two matrices of 8 bits.
_EIGHT_BITS = [f"{a}_{b}" for a in ("fp8", "bf8") for b in ("fp8", "bf8")]
_PASSES = {
    **dict.fromkeys(("16x16x16_f16", "16x16x16_bf16", "16x16x32_f16", "16x16x32_bf16", "16x16x8_xf32"), 4),
    **dict.fromkeys((*(f"16x16x32_{kind}" for kind in _EIGHT_BITS), "16x16x32_i8", "16x16x64_i8"), 4),
    **dict.fromkeys(("32x32x8_f16", "32x32x8_bf16", "32x32x16_f16", "32x32x16_bf16"), 8),
    **dict.fromkeys((*(f"32x32x16_{kind}" for kind in _EIGHT_BITS), "32x32x16_i8", "32x32x32_i8"), 8),
    **dict.fromkeys(("16x16x4_f32", "16x16x128_f8f6f4", "32x32x4_xf32"), 8),
    **dict.fromkeys(("32x32x2_f32", "32x32x64_f8f6f4"), 16),
}
_MATRIX_NAME = re.compile(r"v_mfma_(?:scale_)?[fi]32_(\w+)")
_TRANSCENDENTAL = re.compile(r"v_(?:exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_(?:legacy_)?f(?:16|32|64)")
_PERMLANE_SWAPS = ("v_permlane16_swap_b32", "v_permlane32_swap_b32")
_LANE_READS = ("v_readlane_b32", "v_readfirstlane_b32")
_MEMORY = (Unit.VECTOR_MEMORY, Unit.LOCAL_MEMORY)
_ON_LANES = (Unit.VECTOR, Unit.MATRIX)


@dataclass(frozen=True)
class Facts:
    """One instruction with its effects, for one arch."""

    instruction: Instruction
    arch: str
    effects: Effects

    @classmethod
    def of(cls, instruction: Instruction, arch: str) -> Facts:
        """Raises UnknownInstruction."""
        return cls(instruction, arch, effects_of(instruction))

    @property
    def name(self) -> str:
        """The mnemonic."""
        return self.instruction.name

    @cached_property
    def passes(self) -> int:
        """Passes of a matrix instruction. Raises UnknownInstruction."""
        found = _MATRIX_NAME.fullmatch(self.name)
        passes = _PASSES.get(found[1]) if found else None
        # Other numbers than 0 and 1 are of formats with fewer bits, which may take fewer passes.
        if passes is None or any(self.instruction.number(modifier) > 1 for modifier in ("cbsz", "blgp")):
            raise UnknownInstruction(f"the passes of {self.instruction.text!r}")
        return passes

    @property
    def is_xdl(self) -> bool:
        """True for a matrix instruction of the XDL unit; those of float32 are SGEMM, "SMFMA" in the ISA's tables."""
        return not self.name.endswith("_f32")

    @cached_property
    def states(self) -> int:
        """The wait states that it takes itself."""
        return self.instruction.count + 1 if self.name == "s_nop" else 1

    def of_unit(self, *units: Unit) -> bool:
        """True if one of these units executes it."""
        return self.effects.unit in units


Registers = Callable[[Facts], int]


@dataclass(frozen=True, eq=False)
class Hazard:
    """A row: instructions that must not follow each other closely if they share a register.

    rule:    for messages
    first:   the registers of the earlier instruction that are concerned; 0: the row is not about it
    second:  those of the later one
    most:    wait states between the two, or the most of them
    source:  where LLVM has it
    """

    rule: str
    first: Registers
    second: Registers
    most: int
    source: str

    def states(self, first: Facts, second: Facts) -> int:
        """The wait states between two instructions that share a register."""
        return self.most


@dataclass(frozen=True, eq=False)
class MatrixHazard(Hazard):
    """A row whose wait states depend on the passes of the earlier instruction."""

    by_passes: Callable[[Facts, Facts], int]

    def states(self, first: Facts, second: Facts) -> int:
        """The wait states between two instructions that share a register. Raises UnknownInstruction."""
        return self.by_passes(first, second)


def _after_matrix(first: Facts, second: Facts) -> int:
    """A matrix result read as A or B, or read or written by anything else: passes + 2; XDL + 3, on gfx950 + 4.

    By CDNA3 2, 4, 8, 16 passes of XDL need 5, 7, 11, 19 states, by CDNA4 5, 8, 12, 20.
    """
    if not first.is_xdl:
        return first.passes + 2
    return first.passes + 3 + (first.arch == "gfx950" and first.passes != 2)


def _into_c(first: Facts, second: Facts) -> int:
    """A matrix result read as C: nothing in exactly the same registers, which hardware resolves; 2 after 2 passes."""
    if first.effects.writes == second.effects.third:
        return 2 if first.passes == 2 else 0
    if not first.is_xdl:
        return 0 if second.is_xdl else first.passes
    is_longer = first.arch == "gfx950" and (second.is_xdl or first.passes != 2)
    return first.passes + 1 + is_longer


def _after_c(first: Facts, second: Facts) -> int:
    """Source C overwritten: 2, 4, 8 and 16 passes read it for 1, 3, 7 and 15 states."""
    return first.passes - 1


def _vector_writes(facts: Facts) -> int:
    return facts.effects.writes & VECTORS if facts.of_unit(Unit.VECTOR) else 0


def _scalar_writes(facts: Facts) -> int:
    return facts.effects.writes & SCALARS if facts.of_unit(Unit.VECTOR) else 0


def _only(names: tuple[str, ...], registers: Registers) -> Registers:
    return lambda facts: registers(facts) if facts.name in names else 0


def _by(units: tuple[Unit, ...], registers: Registers) -> Registers:
    return lambda facts: registers(facts) if facts.of_unit(*units) else 0


def _dpp(registers: Registers) -> Registers:
    return lambda facts: registers(facts) if facts.instruction.encoding == "dpp" else 0


def _transcendental(facts: Facts) -> int:
    return facts.effects.writes if _TRANSCENDENTAL.fullmatch(facts.name) else 0


def _after_transcendental(facts: Facts) -> int:
    is_other = facts.of_unit(*_ON_LANES) and not _TRANSCENDENTAL.fullmatch(facts.name)
    return facts.effects.reads & VECTORS if is_other else 0


def _part_of_register(facts: Facts) -> int:
    return _vector_writes(facts) if writes_a_part(facts.instruction) else 0


def _wide_store(facts: Facts) -> int:
    """Data of more than 64 bits."""
    is_store = facts.of_unit(Unit.VECTOR_MEMORY) and facts.effects.stores
    return facts.effects.data if is_store and facts.effects.data.bit_count() > 2 else 0


def _wide_store_without_offset(facts: Facts) -> int:
    """The same, but not of buffers with a register as offset."""
    data = _wide_store(facts)
    has_offset = data and facts.name.startswith("buffer_") and facts.instruction.operands[3].startswith(("s", "m", "v"))
    return 0 if has_offset else data


def _place_of_load(facts: Facts) -> int:
    """M0 of a load into LDS that is no buffer load."""
    return M0_BITS if facts.effects.to_lds and not facts.name.startswith("buffer_") else 0


def _reads(facts: Facts) -> int:
    return facts.effects.reads


def _vector_reads(facts: Facts) -> int:
    return facts.effects.reads & VECTORS


def _touches(facts: Facts) -> int:
    return (facts.effects.reads | facts.effects.writes) & VECTORS


def _writes(facts: Facts) -> int:
    return facts.effects.writes & VECTORS


def _exec(facts: Facts) -> int:
    return EXEC_BITS


_matrix = (Unit.MATRIX,)
MATRIX_WRITE = MatrixHazard(
    "a matrix result is used before it is written",
    _by(_matrix, _writes),
    _by((Unit.VECTOR, *_MEMORY), _touches),
    MOST_STATES,
    "checkMAIVALUHazards, GFX940_XDL_N_PassWriteVgprVALUMemExpReadWaitStates and ...VALUWawWaitStates",
    _after_matrix,
)
MATRIX_INTO_AB = MatrixHazard(
    "a matrix result is source A or B before it is written",
    _by(_matrix, _writes),
    _by(_matrix, lambda facts: facts.effects.sources),
    MOST_STATES,
    "checkMAIHazards90A, GFX940_XDL_N_PassWritesVGPROverlappedSrcABWaitStates",
    _after_matrix,
)
MATRIX_INTO_C = MatrixHazard(
    "a matrix result is a part of source C before it is written",
    _by(_matrix, _writes),
    _by(_matrix, lambda facts: facts.effects.third),
    MOST_STATES,
    "checkMAIHazards90A, GFX940_XDL_N_PassWritesVGPROverlappedXDLOrSMFMASrcCWaitStates",
    _into_c,
)
MATRIX_C = MatrixHazard(
    "source C is overwritten before the matrix instruction has read it",
    lambda facts: facts.effects.third if facts.of_unit(Unit.MATRIX) and facts.is_xdl else 0,
    _by((Unit.VECTOR, *_MEMORY), _writes),
    MOST_STATES,
    "checkMAIVALUHazards, GFX940_XDL4PassReadVgprVALUWarWaitStates",
    _after_c,
)
OF_MATRICES = (MATRIX_WRITE, MATRIX_INTO_AB, MATRIX_INTO_C, MATRIX_C)

ROWS = (
    *OF_MATRICES,
    Hazard(
        "a vector result is a matrix operand too early",
        _vector_writes,
        _by(_matrix, _vector_reads),
        2,
        "checkMAIHazards90A, LegacyVALUNotDotWritesVGPRWaitStates",
    ),
    Hazard(
        "EXEC, written by a vector instruction, is used by a matrix instruction too early",
        lambda facts: _scalar_writes(facts) & EXEC_BITS,
        _by(_matrix, _exec),
        4,
        "checkMAIHazards90A, VALUWritesExecWaitStates",
    ),
    Hazard(
        "a vector result is read by DPP too early",
        _by(_ON_LANES, _writes),
        _dpp(_vector_reads),
        2,
        "checkDPPHazards, DppVgprWaitStates",
    ),
    Hazard(
        "EXEC, written by a vector instruction, is used by DPP too early",
        lambda facts: _scalar_writes(facts) & EXEC_BITS,
        _dpp(_exec),
        5,
        "checkDPPHazards, DppExecWaitStates",
    ),
    Hazard(
        "a scalar register, written by a vector instruction, is read by vector memory too early",
        _scalar_writes,
        _by((Unit.VECTOR_MEMORY,), lambda facts: facts.effects.reads & SCALARS),
        5,
        "checkVMEMHazards, VmemSgprWaitStates",
    ),
    Hazard(
        "a scalar register, written by a vector instruction, is read as a number by one too early",
        _scalar_writes,
        _by(_ON_LANES, lambda facts: facts.effects.reads & SCALARS & ~EXEC_BITS & ~facts.effects.masks),
        2,
        "checkVALUHazards, VALUWriteSGPRVALUReadWaitstates",
    ),
    Hazard(
        "a scalar register, written by a vector instruction, chooses a lane too early",
        _scalar_writes,
        _only(("v_readlane_b32", "v_writelane_b32"), lambda facts: facts.effects.sources),
        4,
        "checkRWLaneHazards, RWLaneWaitStates",
    ),
    Hazard(
        "EXEC, written by a vector instruction, is used by a read or write of one lane too early",
        lambda facts: _scalar_writes(facts) & EXEC_BITS,
        _only((*_LANE_READS, "v_writelane_b32", *_PERMLANE_SWAPS), _exec),
        4,
        "checkVALUHazards, VALUWriteEXECRWLane; checkPermlaneHazards, VCmpXWritesExecWaitStates",
    ),
    Hazard(
        "a vector result is read by one lane too early",
        _vector_writes,
        _only(_LANE_READS, _vector_reads),
        1,
        "checkVALUHazards, VALUWriteVGPRReadlaneRead",
    ),
    Hazard(
        "a vector result is swapped between lanes too early",
        _by(_ON_LANES, _writes),
        _only(_PERMLANE_SWAPS, _vector_reads),
        2,
        "checkPermlaneHazards, VALUWritesVDstWaitStates",
    ),
    Hazard(
        "VCC, written by a vector instruction, is used by v_div_fmas too early",
        lambda facts: _scalar_writes(facts) & VCC_BITS,
        _only(("v_div_fmas_f32", "v_div_fmas_f64"), lambda facts: VCC_BITS),
        4,
        "checkDivFMasHazards, DivFMasWaitStates",
    ),
    Hazard(
        "a transcendental result is read by another kind of vector instruction too early",
        _transcendental,
        _after_transcendental,
        1,
        "checkVALUHazards, TransDefWaitstates",
    ),
    Hazard(
        "a part of a register, written by a vector instruction, is used too early",
        _part_of_register,
        _by(_ON_LANES, _touches),
        1,
        "checkVALUHazards, Shift16DefWaitstates",
    ),
    Hazard(
        "the data of a wide store is overwritten too early",
        _wide_store_without_offset,
        _by(_ON_LANES, _writes),
        2,
        "checkVALUHazardsHelper, VALUWaitStates",
    ),
    Hazard(
        "the data of a wide store with a register as offset is overwritten too early",
        _wide_store,
        _by(_ON_LANES, _writes),
        1,
        "checkVALUHazardsHelper (llvm/llvm-project#197267, which saw it on gfx950; the ISA asks for none)",
    ),
    Hazard(
        "M0, written by a scalar instruction, is the address of a load into LDS too early",
        _by((Unit.SCALAR,), lambda facts: facts.effects.writes & M0_BITS),
        _place_of_load,
        1,
        "checkReadM0Hazards, ReadM0WaitStates",
    ),
    Hazard(
        "a register of the hardware is set twice too early",
        lambda facts: facts.effects.writes & MODE,
        lambda facts: facts.effects.writes & MODE,
        2,
        "checkSetRegHazards, getSetRegWaitStates",
    ),
)
