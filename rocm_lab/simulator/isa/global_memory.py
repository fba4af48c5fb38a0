"""Loads from global memory and stores to it; ISA chapters 8 "Scalar Memory", 9 "Vector Memory", 10 "Flat".

A buffer access whose offset is out of the descriptor's range loads 0 or stores nothing. Triton masks lanes in this way,
with one offset, MASKED_OFFSET. A lane that is out of range with any other offset has wrong arithmetic, which hardware
would hide: a fault.
"""

import re
from collections.abc import Callable

import numpy as np

from rocm_lab.simulator.arrays import I64, Array
from rocm_lab.simulator.assembly import Instruction
from rocm_lab.simulator.core import LANES, M0, Core
from rocm_lab.simulator.faults import SimulationFault, UnknownInstruction
from rocm_lab.simulator.isa.step import Builder, Context, Step
from rocm_lab.simulator.isa.words import WordSink, WordSource
from rocm_lab.simulator.operands import scalar_register, scalar_source, vector_register

# int64 [64] addresses and, for lanes that EXEC makes active, whether they are in range.
Addresses = Callable[[], tuple[Array, Array]]

MASKED_OFFSET = 0x80000000
_SIZES = {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2} | {
    "dword": 4,
    "dwordx2": 8,
    "dwordx3": 12,
    "dwordx4": 16,
}
_LOADED = ("ubyte", "sbyte", "ushort", "sshort", "short_d16", "short_d16_hi", "dword", "dwordx2", "dwordx3", "dwordx4")
_STORED = ("byte", "byte_d16_hi", "short", "short_d16_hi", "dword", "dwordx2", "dwordx3", "dwordx4")
# Cache policies, of which there are no caches here.
_POLICIES = ("sc0", "sc1", "nt")


def access_size(instruction: Instruction) -> int:
    """The bytes that a load or store accesses for each lane."""
    found = re.search(r"_(?:load|store)_(?:lds_)?([a-z]+?(?:x\d)?)(?:_d16\w*)?$", instruction.name)
    assert found is not None, instruction.name
    return _SIZES[found[1]]


def _buffer_addresses(core: Core, instruction: Instruction, operands: tuple[str, ...], size: int) -> Addresses:
    """From (vector offset, descriptor, scalar offset): base, stride 0, num_records, flags."""
    instruction.allow("offen", "offset", "lds", *_POLICIES)
    lane_offset, descriptor, scalar_offset = operands
    base = scalar_register(descriptor).index
    scalar = scalar_source(core, scalar_offset, 32)
    immediate = instruction.number("offset")
    has_offset = "offen" in instruction.modifiers
    row = core.vector[vector_register(lane_offset).index] if has_offset else np.zeros(LANES, np.uint32)

    def addresses() -> tuple[Array, Array]:
        high = int(core.scalar[base + 1])
        if high >> 16:
            raise UnknownInstruction(f"a descriptor with stride or swizzle in {instruction.text!r}")
        offsets = row.astype(I64) + immediate
        in_range = offsets + size <= int(core.scalar[base + 2])
        stray = core.active & ~in_range & (row != MASKED_OFFSET)
        if stray.any():
            raise SimulationFault(
                f"lane {int(stray.argmax())} has the buffer offset 0x{int(row[stray][0]):x}, out of range: it wrapped "
                f"around or was never meant to be read"
            )
        return offsets + (core.read_pair(base) + scalar()), in_range

    return addresses


def _global_addresses(core: Core, instruction: Instruction, operands: tuple[str, ...]) -> Addresses:
    """From (64-bit address, off), or (32-bit offset, scalar base)."""
    instruction.allow("offset", *_POLICIES)
    lane_address, base = operands
    index = vector_register(lane_address).index
    low = core.vector[index]
    immediate = instruction.number("offset")
    everywhere = np.ones(LANES, np.bool_)
    if base == "off":
        high = core.vector[index + 1]
        return lambda: ((low.astype(I64) | high.astype(I64) << 32) + immediate, everywhere)
    scalar = scalar_register(base).index
    return lambda: (low.astype(I64) + (core.read_pair(scalar) + immediate), everywhere)


def memory_addresses(core: Core, instruction: Instruction, operands: tuple[str, ...], size: int) -> Addresses:
    """Returns the addresses at which an instruction accesses size bytes per lane; operands: without data registers."""
    if instruction.name.startswith("buffer_"):
        return _buffer_addresses(core, instruction, operands, size)
    return _global_addresses(core, instruction, operands)


def _load_lanes(core: Core, addresses: Addresses, size: int) -> Array:
    """uint8 [active lanes, size], 0 for lanes out of range."""
    where, in_range = addresses()
    live = in_range[core.active]
    if live.all():
        return core.memory.load(where[core.active], size)
    values = np.zeros((len(live), size), np.uint8)
    if live.any():
        values[live] = core.memory.load(where[core.active][live], size)
    return values


def _load(context: Context, instruction: Instruction) -> Step:
    core, size = context.core, access_size(instruction)
    if "lds" in instruction.modifiers:
        return _load_to_lds(context, instruction)
    addresses = memory_addresses(core, instruction, instruction.operands[1:], size)
    index = vector_register(instruction.operands[0]).index
    sink = WordSink(
        core,
        index,
        size,
        is_signed=re.search(r"_s(byte|short)", instruction.name) is not None,
        half=int(instruction.name.endswith("_d16_hi")),
    )
    write = sink.write_half if "_d16" in instruction.name else sink.write

    def step() -> None:
        if core.any_active:
            write(_load_lanes(core, addresses, size))

    return step


def _load_to_lds(context: Context, instruction: Instruction) -> Step:
    """Lane after lane from the LDS offset in M0 on; lanes that are not active leave their place as it is."""
    core, size = context.core, access_size(instruction)
    addresses = memory_addresses(core, instruction, instruction.operands, size)
    immediate = instruction.number("offset")
    lane_offset = np.arange(LANES) * size

    def step() -> None:
        if core.any_active:
            values = _load_lanes(core, addresses, size)
            offsets = int(core.scalar[M0]) + immediate + lane_offset
            core.lds.store(offsets[core.active], values, core.wave_number)

    return step


def _store(context: Context, instruction: Instruction) -> Step:
    core, size = context.core, access_size(instruction)
    if instruction.name.startswith("buffer_"):
        value, *rest = instruction.operands
    else:
        lane_address, value, base = instruction.operands
        rest = [lane_address, base]
    addresses = memory_addresses(core, instruction, tuple(rest), size)
    source = WordSource(core, vector_register(value).index, size, upper_half=instruction.name.endswith("_d16_hi"))

    def step() -> None:
        if not core.any_active:
            return
        where, in_range = addresses()
        live = in_range[core.active]
        if live.any():
            core.memory.store(where[core.active][live], source.read()[live])

    return step


def _scalar_load(context: Context, instruction: Instruction) -> Step:
    """s_load: some registers from a 64-bit base, an offset, and the modifier's if that offset is a register.

    The low two bits of the address do not count. Source: AMD Instinct MI300 ISA, "Scalar Memory Addressing".
    """
    core = context.core
    instruction.allow("offset")
    immediate = instruction.number("offset")
    words = int(re.sub(r"s_load_dword(x)?", "", instruction.name) or 1)
    destination, base = (scalar_register(token).index for token in instruction.operands[:2])
    if destination + words > M0:
        raise UnknownInstruction(f"the destination of {instruction.text!r}")
    offset = scalar_source(core, instruction.operands[2], 32)

    def step() -> None:
        address = core.read_pair(base) + offset() + immediate & ~3
        loaded = core.memory.load(np.array([address], np.int64), 4 * words)
        core.scalar[destination : destination + words] = loaded.view(np.uint32)[0]

    return step


BUILDERS: dict[str, Builder] = {
    **{f"{space}_load_{kind}": _load for space in ("buffer", "global") for kind in _LOADED},
    **{f"{space}_store_{kind}": _store for space in ("buffer", "global") for kind in _STORED},
    **{f"global_load_lds_{kind}": _load_to_lds for kind in ("dword", "dwordx3", "dwordx4")},
    **{f"s_load_dword{count}": _scalar_load for count in ("", "x2", "x3", "x4", "x8", "x16")},
}
