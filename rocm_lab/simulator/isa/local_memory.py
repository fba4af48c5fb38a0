"""Loads from LDS and stores to it; ISA chapter 11 "Data Share Operations" and section 12.13 (DS).

ds_read_b64_tr_b16 and _tr_b8 are new with gfx950: transposing loads, "AMD Instinct CDNA4 Instruction Set Architecture"
11.4.
"""

import re

import numpy as np

from rocm_lab.simulator.arrays import I64, U32
from rocm_lab.simulator.assembly import Instruction
from rocm_lab.simulator.core import Core
from rocm_lab.simulator.faults import UnknownInstruction
from rocm_lab.simulator.isa.step import Builder, Context, Step
from rocm_lab.simulator.isa.words import WordSink, WordSource
from rocm_lab.simulator.operands import vector_register

_SIZES = {"u8": 1, "i8": 1, "b8": 1, "u16": 2, "i16": 2, "b16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}


def _offsets(instruction: Instruction, size: int) -> list[int]:
    """The byte offsets of an instruction's one or two accesses; two are counted in elements, or in 64 of them."""
    if not re.match(r"ds_(read|write)2", instruction.name):
        instruction.allow("offset")
        return [instruction.number("offset")]
    instruction.allow("offset0", "offset1")
    unit = size * 64 if "st64" in instruction.name else size
    return [instruction.number("offset0") * unit, instruction.number("offset1") * unit]


def reach_of(instruction: Instruction) -> tuple[int, int]:
    """The bytes that a load reads, relative to its address: the first, and one past the last."""
    size = _SIZES[_kind(instruction)[0].partition("_")[0]]
    offsets = _offsets(instruction, size)
    return min(offsets), max(offsets) + size


def _load(context: Context, instruction: Instruction) -> Step:
    core = context.core
    kind, is_upper_half = _kind(instruction)
    size = _SIZES[kind]
    index = vector_register(instruction.operands[0]).index
    address = core.vector[vector_register(instruction.operands[1]).index]
    offsets = _offsets(instruction, size)
    sinks = [
        WordSink(core, index + access * max(1, size // 4), size, is_signed=kind[0] == "i", half=int(is_upper_half))
        for access in range(len(offsets))
    ]
    writes = [sink.write_half if "_d16" in instruction.name else sink.write for sink in sinks]

    def step() -> None:
        if not core.any_active:
            return
        addresses = address.astype(I64)[core.active]
        loaded = [core.lds.load(addresses + offset, size, core.wave_number) for offset in offsets]
        for write, values in zip(writes, loaded, strict=True):
            write(values)

    return step


def _store(context: Context, instruction: Instruction) -> Step:
    core = context.core
    kind, is_upper_half = _kind(instruction)
    size = _SIZES[kind]
    address = core.vector[vector_register(instruction.operands[0]).index]
    sources = [
        WordSource(core, vector_register(token).index, size, upper_half=is_upper_half)
        for token in instruction.operands[1:]
    ]
    offsets = _offsets(instruction, size)

    def step() -> None:
        if not core.any_active:
            return
        addresses = address.astype(I64)[core.active]
        for offset, source in zip(offsets, sources, strict=True):
            core.lds.store(addresses + offset, source.read(), core.wave_number)

    return step


def _add(context: Context, instruction: Instruction) -> Step:
    core = context.core
    instruction.allow("offset")
    address, values = (core.vector[vector_register(token).index] for token in instruction.operands)
    offset = instruction.number("offset")

    def step() -> None:
        if core.any_active:
            core.lds.add(address.astype(I64)[core.active] + offset, values[core.active], core.wave_number)

    return step


def _kind(instruction: Instruction) -> tuple[str, bool]:
    """The type of an access, and whether it accesses the upper half of a register."""
    found = re.fullmatch(r"ds_(?:read|write)2?(?:st64)?_(\w+?)(_d16)?(_d16_hi|_hi)?", instruction.name)
    assert found is not None, instruction.name
    return found[1], found[3] is not None


def _load_transposed(context: Context, instruction: Instruction) -> Step:
    """Per 16 lanes, element j of lane i: with n elements of a lane, 4 or 8, element i % n of the data at the address of
    lane i // n + 16 / n j."""
    if context.arch != "gfx950":
        raise UnknownInstruction(f"{instruction.name} on {context.arch}")
    core: Core = context.core
    instruction.allow("offset")
    offset = instruction.number("offset")
    index = vector_register(instruction.operands[0]).index
    address = core.vector[vector_register(instruction.operands[1]).index]
    dtype = np.uint16 if instruction.name.endswith("b16") else np.uint8
    num = 8 // np.dtype(dtype).itemsize
    lane, element = np.arange(16)[:, None], np.arange(num)[None]

    def step() -> None:
        if not core.all_active:
            raise UnknownInstruction(f"{instruction.name} with inactive lanes")
        loaded = core.lds.load(address.astype(I64) + offset, 8, core.wave_number).view(dtype).reshape(4, 16, num)
        chosen = loaded[:, lane // num + 16 // num * element, lane % num]
        turned = np.ascontiguousarray(chosen).reshape(64, num).view(U32)
        core.vector[index : index + 2] = turned.T

    return step


_LOADS = [
    *(f"ds_read_{kind}" for kind in ("u8", "i8", "u16", "i16", "b32", "b64", "b96", "b128")),
    *(f"ds_read_u16_d16{half}" for half in ("", "_hi")),
    *(f"ds_read2{stride}_{kind}" for stride in ("", "st64") for kind in ("b32", "b64")),
]
_STORES = [
    *(f"ds_write_{kind}" for kind in ("b8", "b16", "b32", "b64", "b96", "b128")),
    *(f"ds_write_{kind}_d16_hi" for kind in ("b8", "b16")),
    *(f"ds_write2{stride}_{kind}" for stride in ("", "st64") for kind in ("b32", "b64")),
]

# Those that are in no order between two barriers, as atomics of global memory.
ATOMICS = ("ds_add_u32",)

BUILDERS: dict[str, Builder] = {
    **dict.fromkeys(ATOMICS, _add),
    **dict.fromkeys(_LOADS, _load),
    **dict.fromkeys(_STORES, _store),
    **dict.fromkeys(("ds_read_b64_tr_b16", "ds_read_b64_tr_b8"), _load_transposed),
}
