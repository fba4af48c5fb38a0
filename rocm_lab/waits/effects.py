"""The registers that an instruction reads and writes, and the unit that executes it.

Registers come from the operands as written: the assembler accepts a register operand in its true width alone. The
tables of rocm_lab/simulator/isa say which instructions exist, how many destinations each has, and whether a destination
is read too. Sources: "AMD Instinct MI300 Instruction Set Architecture" and "AMD Instinct CDNA4 Instruction Set
Architecture", chapters 5 to 12.
"""

import re
from dataclasses import dataclass
from enum import Enum

from rocm_lab.simulator.assembly import Instruction
from rocm_lab.simulator.faults import UnknownInstruction
from rocm_lab.simulator.isa import atomic, control, cross_lane, global_memory, local_memory, matrix, scalar, scratch
from rocm_lab.simulator.isa.instructions import BUILDERS, VECTOR_OPS
from rocm_lab.simulator.isa.vector import MASK
from rocm_lab.waits.registers import EXEC_BITS, M0_BITS, MODE, VCC_BITS, registers_of


class Unit(Enum):
    """The unit that executes an instruction."""

    CONTROL = "control"
    SCALAR = "scalar"
    VECTOR = "vector"
    MATRIX = "matrix"
    VECTOR_MEMORY = "vector memory"
    LOCAL_MEMORY = "local memory"
    SCALAR_MEMORY = "scalar memory"


@dataclass(frozen=True, slots=True)
class Effects:
    """The effects of one instruction; registers are bits (registers.py).

    unit:           which executes it
    reads, writes:  registers, those included that no operand names: EXEC where it decides which lanes are read, M0,
                    the mode, and a destination of which a part stays
    sources:        of a matrix instruction, sources A and B; of v_readlane and v_writelane, the lane's number
    third:          of a matrix instruction, source C
    masks:          scalar registers that a vector instruction reads as a carry or a choice, a bit for each lane
    data:           of a store: what is stored
    to_lds:         true if a load writes LDS in place of registers
    stores:         true if memory or LDS is written from registers
    """

    unit: Unit
    reads: int = 0
    writes: int = 0
    sources: int = 0
    third: int = 0
    masks: int = 0
    data: int = 0
    to_lds: bool = False
    stores: bool = False


# Scalar instructions that combine a constant with the number that they write over.
WITH_A_CONSTANT = ("s_addk_i32", "s_mulk_i32")

# Instructions that the simulator does not execute: vector instructions with one destination, or with two that are their
# sources, and scalar ones that write a bit of theirs. No document says whether cache controls count in vmcnt. Not to
# count them proves less.
_VECTOR_TOO = re.compile(r"v_cmpx_\w+_[fiu](?:16|32|64)|v_fract_f64|v_(?:add|sub)_i32|v_nop|v_swap_b32|v_cvt_pk_u8_f32")
_SET_A_BIT = ("s_bitset0_b32", "s_bitset1_b32")
_SWAPS = ("v_permlane16_swap_b32", "v_permlane32_swap_b32", "v_swap_b32")
_READ_EXEC = ("v_readlane_b32", "v_readfirstlane_b32", "v_writelane_b32")
# The low or the high half of the destination stays.
_TO_CODES = tuple(
    f"v_cvt_{form}pk_{kind}_{wide}"
    for form, wide in (("", "f32"), *(("scalef32_", wide) for wide in ("f32", "f16", "bf16")))
    for kind in ("fp8", "bf8")
)
_KEEP_A_HALF = ("v_fma_mixlo_f16", "v_fma_mixhi_f16", *_TO_CODES, "v_writelane_b32")


def effects_of(instruction: Instruction) -> Effects:
    """The effects of an instruction. Raises UnknownInstruction, also for one that lacks operands."""
    try:
        return _effects(instruction)
    except (IndexError, ValueError) as error:
        raise UnknownInstruction(f"the operands of {instruction.text!r}") from error


def _effects(instruction: Instruction) -> Effects:
    name = instruction.name
    if name in control.BUILDERS:
        return _control(instruction)
    if name in scalar.BUILDERS:
        return _scalar(instruction)
    if name in matrix.BUILDERS:
        result, a, b, c, *scales = (registers_of(token) for token in instruction.operands)
        sources = _union([a, b, *scales])
        return Effects(Unit.MATRIX, sources | c, result, sources=sources, third=c)
    if name.startswith("s_load_dword") and name in global_memory.BUILDERS:
        destination, *rest = (registers_of(token) for token in instruction.operands)
        return Effects(Unit.SCALAR_MEMORY, _union(rest), destination)
    if name in global_memory.BUILDERS or name in atomic.BUILDERS or name in scratch.BUILDERS:
        return _vector_memory(instruction)
    if name in local_memory.BUILDERS or (name in cross_lane.BUILDERS and name.startswith("ds_")):
        tokens = [registers_of(token) for token in instruction.operands]
        if "_write" in name or name in local_memory.ATOMICS:
            return Effects(Unit.LOCAL_MEMORY, _union(tokens), data=_union(tokens[1:]), stores=True)
        kept = tokens[0] if "_d16" in name else 0
        return Effects(Unit.LOCAL_MEMORY, _union(tokens[1:]) | kept, tokens[0])
    if name in BUILDERS or _VECTOR_TOO.fullmatch(name):
        return _vector(instruction)
    raise UnknownInstruction(f"{name} of {instruction.text!r}")


def _union(masks: list[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found


def _first_half(mask: int) -> int:
    """The lower half of the registers of a mask, which follow each other."""
    return mask & mask >> mask.bit_count() // 2


def _control(instruction: Instruction) -> Effects:
    name = instruction.name
    if name.startswith("s_setreg"):
        return Effects(Unit.SCALAR, writes=MODE)
    reads = VCC_BITS * name.startswith("s_cbranch_vcc") | EXEC_BITS * name.startswith("s_cbranch_exec")
    return Effects(Unit.CONTROL, reads)


def _scalar(instruction: Instruction) -> Effects:
    name = instruction.name
    tokens = [registers_of(token) for token in instruction.operands]
    if re.match(r"s_(?:cmp|bitcmp)", name):
        return Effects(Unit.SCALAR, _union(tokens))
    exec_too = EXEC_BITS * ("_saveexec_" in name)
    kept = tokens[0] * (name in (*WITH_A_CONSTANT, *_SET_A_BIT))
    return Effects(Unit.SCALAR, _union(tokens[1:]) | exec_too | kept, tokens[0] | exec_too)


def _vector_memory(instruction: Instruction) -> Effects:
    name = instruction.name
    tokens = [registers_of(token) for token in instruction.operands]
    is_buffer = name.startswith("buffer_")
    if "lds" in instruction.modifiers or "_load_lds_" in name:
        return Effects(Unit.VECTOR_MEMORY, _union(tokens) | M0_BITS, to_lds=True)
    if "_store_" in name:
        data = tokens[0] if is_buffer else tokens[1]
        return Effects(Unit.VECTOR_MEMORY, _union(tokens), data=data, stores=True)
    if "_atomic_" in name:
        returns = "sc0" in instruction.modifiers
        # A buffer's atomic returns into the register of its data, a global one into one before them. A buffer's
        # compare-and-swap returns into the first half of its data.
        halves = is_buffer and "_cmpswap" in name
        written = (_first_half(tokens[0]) if halves else tokens[0]) * returns
        read = _union(tokens if is_buffer or not returns else tokens[1:])
        data = tokens[0] if is_buffer else tokens[1 + returns]
        return Effects(Unit.VECTOR_MEMORY, read, written, data=data, stores=True)
    kept = tokens[0] if "_d16" in name else 0
    return Effects(Unit.VECTOR_MEMORY, _union(tokens[1:]) | kept, tokens[0])


def _vector(instruction: Instruction) -> Effects:
    name = instruction.name
    op = VECTOR_OPS.get(name)
    tokens = [registers_of(token) for token in instruction.operands]
    if name in _SWAPS:
        return Effects(Unit.VECTOR, _union(tokens), _union(tokens))
    count = 2 if name.startswith("v_div_scale_") or (op is not None and op.has_mask) else 1
    writes, reads = _union(tokens[:count]), _union(tokens[count:])
    accumulates = name.startswith("v_fmac_") or (op is not None and op.accumulates)
    if accumulates or name in _KEEP_A_HALF or instruction.encoding == "dpp" or writes_a_part(instruction):
        reads |= tokens[0]
    if name.startswith("v_div_fmas"):
        reads |= VCC_BITS
    if name.startswith("v_cmpx_"):
        writes |= EXEC_BITS
    if name in _READ_EXEC or instruction.encoding == "dpp":
        reads |= EXEC_BITS
    lane = tokens[2] if name in ("v_readlane_b32", "v_writelane_b32") else 0
    masks = tokens[-1] if op is not None and op.sources[-1:] == (MASK,) else 0
    return Effects(Unit.VECTOR, reads, writes, sources=lane, masks=masks)


def writes_a_part(instruction: Instruction) -> bool:
    """True if the result is moved to a part of its register, by SDWA, or to an upper half by op_sel."""
    if instruction.modifiers.get("dst_sel", "DWORD") != "DWORD":
        return True
    op = VECTOR_OPS.get(instruction.name)
    chosen = instruction.bits("op_sel", ())
    if instruction.name in _TO_CODES:
        return any(chosen[-1:])
    if op is None or op.result == MASK or op.result.itemsize != 2:
        return False
    return len(chosen) == len(op.sources) + 1 and bool(chosen[-1])
