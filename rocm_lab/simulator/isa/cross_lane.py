"""Moves between lanes, and between lanes and scalars; ISA sections 12.8, 12.10 and 12.13 (VOP1, VOP3, DS).

v_permlane16_swap and v_permlane32_swap are new with gfx950. Nothing here touches LDS, not even ds_bpermute.
"""

import re
from collections.abc import Callable
from functools import partial

import numpy as np

from rocm_lab.simulator.arrays import U32, Array
from rocm_lab.simulator.assembly import Instruction
from rocm_lab.simulator.core import LANES
from rocm_lab.simulator.faults import UnknownInstruction
from rocm_lab.simulator.isa.step import Builder, Context, Step
from rocm_lab.simulator.operands import VectorSink, scalar_register, scalar_source, vector_register

_LANE = np.arange(LANES)


def _read_first_lane(context: Context, instruction: Instruction) -> Step:
    """Reads the first active lane; lane 0 if none is active."""
    core = context.core
    index = scalar_register(instruction.operands[0]).index
    row = core.vector[vector_register(instruction.operands[1]).index]
    return lambda: core.write_scalar(index, int(row[int(core.active.argmax())]))


def _read_lane(context: Context, instruction: Instruction) -> Step:
    core = context.core
    index = scalar_register(instruction.operands[0]).index
    row = core.vector[vector_register(instruction.operands[1]).index]
    lane = scalar_source(core, instruction.operands[2], 32)
    return lambda: core.write_scalar(index, int(row[lane() & 63]))


def _write_lane(context: Context, instruction: Instruction) -> Step:
    """Ignores EXEC."""
    core = context.core
    row = core.vector[vector_register(instruction.operands[0]).index]
    value, lane = (scalar_source(core, token, 32) for token in instruction.operands[1:])

    def step() -> None:
        row[lane() & 63] = value()

    return step


def _swap(context: Context, instruction: Instruction) -> Step:
    """The odd groups of the first register change places with the even groups of the second."""
    if context.arch != "gfx950":
        raise UnknownInstruction(f"{instruction.name} on {context.arch}")
    group = 32 if "32" in instruction.name.split("_")[1] else 16
    a, b = (context.core.vector[vector_register(token).index] for token in instruction.operands)
    is_odd = (_LANE & group) != 0
    core = context.core

    def step() -> None:
        if not core.all_active:
            raise UnknownInstruction(f"{instruction.name} with inactive lanes")
        before = a.copy()
        a[is_odd] = b[~is_odd]
        b[~is_odd] = before[is_odd]

    return step


def _permuted(context: Context, instruction: Instruction, move: Callable[[Array, Array, Array], Array]) -> Step:
    """Writes move(lanes, values, active): a lane's number, times 4, is in its address."""
    core = context.core
    instruction.allow("offset")
    offset = np.uint32(instruction.number("offset"))
    sink = VectorSink(core, instruction.operands[0], U32)
    address, values = (core.vector[vector_register(token).index] for token in instruction.operands[1:])
    return lambda: sink.write(move((address + offset) >> np.uint32(2) & np.uint32(63), values, core.active))


def _gather(lane: Array, values: Array, active: Array) -> Array:
    """ds_bpermute_b32: the value of the addressed lane; 0 for an inactive lane."""
    return np.where(active[lane], values[lane], np.uint32(0))


def _scatter(lane: Array, values: Array, active: Array) -> Array:
    """ds_permute_b32: to the addressed lane; if several address a lane it gets the last one's value, if none does 0."""
    moved = np.zeros(LANES, np.uint32)
    for source in np.flatnonzero(active):
        moved[lane[source]] = values[source]
    return moved


def _swizzle(context: Context, instruction: Instruction) -> Step:
    """A fixed pattern in each half of 32 lanes; 0 for an inactive lane."""
    core = context.core
    lane = _swizzled(instruction)
    sink = VectorSink(core, instruction.operands[0], U32)
    values = core.vector[vector_register(instruction.operands[1]).index]
    return lambda: sink.write(np.where(core.active[lane], values[lane], np.uint32(0)))


def _swizzled(instruction: Instruction) -> Array:
    """The source lanes of a ds_swizzle; only the forms that Triton uses."""
    instruction.allow("offset")
    found = re.fullmatch(r"swizzle\((SWAP|REVERSE),(\d+)\)", instruction.modifiers["offset"].replace(" ", ""))
    if found:
        size = int(found[2])
        return _LANE ^ size if found[1] == "SWAP" else _LANE ^ (size - 1)
    if not instruction.modifiers["offset"].isdigit() or instruction.number("offset") & 0x8000:
        raise UnknownInstruction(f"the pattern of {instruction.text!r}")
    bits = instruction.number("offset")
    return (_LANE & 32) + ((_LANE & 31 & bits | bits >> 5 & 31) ^ (bits >> 10 & 31))


BUILDERS: dict[str, Builder] = {
    "v_readfirstlane_b32": _read_first_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    "v_permlane16_swap_b32": _swap,
    "v_permlane32_swap_b32": _swap,
    "ds_bpermute_b32": partial(_permuted, move=_gather),
    "ds_permute_b32": partial(_permuted, move=_scatter),
    "ds_swizzle_b32": _swizzle,
}
