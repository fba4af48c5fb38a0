"""How a vector instruction is executed; what each computes is in the tables of vector_integer, vector_float, convert.

ISA chapter 6 "Vector ALU Operations": encodings, sub-dword selects (SDWA), data-parallel primitives (DPP), masks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rocm_lab.simulator.assembly import Instruction
from rocm_lab.simulator.core import Core
from rocm_lab.simulator.faults import UnknownInstruction
from rocm_lab.simulator.isa.dpp import DPP_MODIFIERS, lane_pattern
from rocm_lab.simulator.isa.step import Builder, Context, Step
from rocm_lab.simulator.operands import (
    Source,
    VectorSink,
    all_lanes,
    mask_source,
    scalar_register,
    vector_register,
    vector_source,
)

# A pair of scalar registers with a bit for each lane, as an operand's type.
MASK = np.dtype(np.bool_)


@dataclass(frozen=True, slots=True)
class VectorOp:
    """One row of a table.

    result:       type of the destination
    sources:      types of the sources
    compute:      sources, [1] or [64] of their types, to the result; or to it and a mask, see has_mask
    has_mask:     a mask, such as a carry, is the second destination
    accumulates:  the destination is the last source
    clamped:      compute of the form with the modifier clamp, where it is known
    """

    result: np.dtype[Any]
    sources: tuple[np.dtype[Any], ...]
    compute: Callable[..., Any]
    has_mask: bool = False
    accumulates: bool = False
    clamped: Callable[..., Any] | None = None


def build(context: Context, instruction: Instruction, op: VectorOp) -> Step:
    """The step of an instruction whose semantics are a row of a table."""
    core = context.core
    tokens = list(instruction.operands)
    destinations = [tokens.pop(0) for _ in range(1 + op.has_mask)]
    if op.accumulates:
        tokens.append(destinations[0])
    if len(tokens) != len(op.sources):
        raise UnknownInstruction(f"{len(tokens)} sources of {instruction.text!r}")
    if instruction.encoding == "dpp":
        return _build_dpp(core, instruction, op, destinations, tokens)
    reads = _sources(core, instruction, op, tokens)
    compute = op.compute
    if "clamp" in instruction.modifiers:
        if op.clamped is None:
            raise UnknownInstruction(f"clamp of {instruction.text!r}")
        compute = op.clamped
    if op.has_mask:
        return _step_with_mask(core, compute, reads, op, destinations)
    if op.result == MASK:
        index = scalar_register(destinations[0]).index
        return lambda: core.write_mask(index, compute(*[read() for read in reads]))
    write: Callable[[Any], None] = VectorSink(core, destinations[0], op.result).write
    if instruction.modifiers.get("dst_sel", "DWORD") != "DWORD":
        write = _part_of_register(core, instruction, destinations[0])
    if len(reads) == 1:
        (a,) = reads
        return lambda: write(compute(a()))
    if len(reads) == 2:
        a, b = reads
        return lambda: write(compute(a(), b()))
    return lambda: write(compute(*[read() for read in reads]))


def builders_of(ops: Mapping[str, VectorOp]) -> dict[str, Builder]:
    """The builders of a table's instructions."""
    return dict.fromkeys(ops, lambda context, instruction: build(context, instruction, ops[instruction.name]))


def _sources(core: Core, instruction: Instruction, op: VectorOp, tokens: list[str]) -> list[Source]:
    if instruction.encoding == "sdwa":
        return _sdwa_sources(core, instruction, op, tokens)
    instruction.allow("clamp", "op_sel", "bitop3")
    halves = instruction.bits("op_sel", (0,) * len(tokens))
    # Upper halves of 16-bit sources are known; after the sources op_sel may have a bit for the destination.
    chosen = [dtype for half, dtype in zip(halves, op.sources, strict=False) if half]
    if any(dtype.itemsize != 2 for dtype in chosen) or any(halves[len(tokens) :]):
        raise UnknownInstruction(f"op_sel of {instruction.text!r}")
    return [
        _source(core, token, dtype, high=bool(half))
        for token, dtype, half in zip(tokens, op.sources, halves, strict=False)
    ]


def _source(core: Core, token: str, dtype: np.dtype[Any], *, high: bool = False) -> Source:
    return mask_source(core, token) if dtype == MASK else vector_source(core, token, dtype, high=high)


def _step_with_mask(
    core: Core, compute: Callable[..., Any], reads: list[Source], op: VectorOp, destinations: list[str]
) -> Step:
    write = VectorSink(core, destinations[0], op.result).write
    index = scalar_register(destinations[1]).index

    def step() -> None:
        result, mask = compute(*[read() for read in reads])
        write(result)
        core.write_mask(index, all_lanes(mask))

    return step


_SDWA_PARTS = {
    **{f"BYTE_{byte}": ("uint8", byte) for byte in range(4)},
    **{f"WORD_{word}": ("uint16", word) for word in range(2)},
}


def _sdwa_sources(core: Core, instruction: Instruction, op: VectorOp, tokens: list[str]) -> list[Source]:
    """Bytes or halves of 32-bit registers, zero- or sign-extended."""
    instruction.allow("clamp", "dst_sel", "dst_unused", "src0_sel", "src1_sel")
    reads = []
    for number, (token, dtype) in enumerate(zip(tokens, op.sources, strict=True)):
        part = instruction.modifiers.get(f"src{number}_sel", "DWORD")
        reads.append(_source(core, token, dtype) if part == "DWORD" else _sdwa_source(core, token, dtype, part))
    return reads


def _part_of_register(core: Core, instruction: Instruction, destination: str) -> Callable[[Any], None]:
    """Writes the low bits of a result of 16 or 32 bits to a byte or a half; the other bits become 0 or stay."""
    name, number = _SDWA_PARTS[instruction.modifiers["dst_sel"]]
    unused = instruction.modifiers.get("dst_unused")
    if unused not in ("UNUSED_PAD", "UNUSED_PRESERVE"):
        raise UnknownInstruction(f"dst_unused of {instruction.text!r}")
    bits = 8 * np.dtype(name).itemsize
    mask, shift = np.uint32((1 << bits) - 1), np.uint32(bits * number)
    held = core.vector[vector_register(destination).index]
    kept = np.uint32(0) if unused == "UNUSED_PAD" else ~(mask << shift)
    sink = VectorSink(core, destination, np.dtype(np.uint32)).write

    def write(value: Any) -> None:
        low = value.view(f"u{value.dtype.itemsize}").astype(np.uint32)
        sink(held & kept | (low & mask) << shift)

    return write


def _sdwa_source(core: Core, token: str, dtype: np.dtype[Any], part: str) -> Source:
    is_signed = token.startswith("sext(")
    index = vector_register(token[5:-1] if is_signed else token).index
    name, number = _SDWA_PARTS[part]
    if dtype.kind == "f":
        if is_signed or dtype.itemsize != np.dtype(name).itemsize:
            raise UnknownInstruction(f"part {part} of a source of type {dtype}")
        name = dtype.name
    narrow = core.vector[index].view(name[1:] if is_signed else name)
    values = narrow[number :: 4 // narrow.itemsize]
    return lambda: values.astype(dtype)


def _build_dpp(core: Core, instruction: Instruction, op: VectorOp, destinations: list[str], tokens: list[str]) -> Step:
    """The first source comes from other lanes. A lane whose source lane is outside or inactive reads 0, or is left."""
    if op.has_mask or op.result == MASK:
        raise UnknownInstruction(f"DPP of {instruction.text!r}")
    instruction.allow(*DPP_MODIFIERS)
    first, *rest = (_source(core, token, dtype) for token, dtype in zip(tokens, op.sources, strict=True))
    sink = VectorSink(core, destinations[0], op.result)
    pattern = lane_pattern(instruction)
    zero = op.sources[0].type(0)

    def step() -> None:
        has_source = pattern.is_inside & core.active[pattern.source_lane]
        values = np.where(has_source, all_lanes(first())[pattern.source_lane], zero)
        writes = pattern.is_enabled & core.active
        if not pattern.reads_zero:
            writes = writes & has_source
        sink.write_where(all_lanes(op.compute(values, *[read() for read in rest])), writes)

    return step
