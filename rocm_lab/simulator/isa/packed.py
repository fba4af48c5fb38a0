"""Two results from one instruction: packed float32 and packed 16-bit operations; ISA section 12.11 (VOP3P).

op_sel and op_sel_hi choose, for each source, the half that the low and the high result are computed from.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from rocm_lab.simulator.arrays import F16, F32, I16, U16, U32, Array
from rocm_lab.simulator.assembly import Instruction
from rocm_lab.simulator.core import Core
from rocm_lab.simulator.faults import UnknownInstruction
from rocm_lab.simulator.isa.step import Builder, Context, Step
from rocm_lab.simulator.isa.vector_float import fma
from rocm_lab.simulator.operands import Source, VectorSink, register, vector_source

# Name -> number of sources and the function of each half.
_PAIRS_OF_FLOATS: dict[str, tuple[int, Callable[..., Array]]] = {
    "v_pk_add_f32": (2, operator.add),
    "v_pk_mul_f32": (2, operator.mul),
    "v_pk_fma_f32": (3, fma),
}
_PAIRS_OF_HALVES: dict[str, tuple[np.dtype[Any], Callable[..., Array]]] = {
    **{
        f"v_pk_{name}_{type_name}": (dtype, compute)
        for name, compute in (("max", np.maximum), ("min", np.minimum))
        for type_name, dtype in (("u16", U16), ("i16", I16))
    },
    "v_pk_add_u16": (U16, operator.add),
    "v_pk_sub_u16": (U16, operator.sub),
    "v_pk_sub_i16": (I16, operator.sub),
    "v_pk_mul_lo_u16": (U16, operator.mul),
    "v_pk_lshlrev_b16": (U16, lambda by, a: a << (by & np.uint16(15))),
    "v_pk_lshrrev_b16": (U16, lambda by, a: a >> (by & np.uint16(15))),
    "v_pk_add_f16": (F16, operator.add),
    "v_pk_mul_f16": (F16, operator.mul),
    "v_pk_fma_f16": (F16, fma),
    "v_pk_max_f16": (F16, np.fmax),
    "v_pk_min_f16": (F16, np.fmin),
}


def _floats(context: Context, instruction: Instruction) -> Step:
    count, compute = _PAIRS_OF_FLOATS[instruction.name]
    instruction.allow("op_sel", "op_sel_hi", "neg_lo", "neg_hi")
    destination, *tokens = instruction.operands

    def sources(select: str, default: int, negate: str) -> list[Source]:
        halves = instruction.bits(select, (default,) * count)
        signs = instruction.bits(negate, (0,) * count)
        rows = zip(tokens, halves, signs, strict=True)
        return [_float_half(context.core, instruction, *row) for row in rows]

    low, high = sources("op_sel", 0, "neg_lo"), sources("op_sel_hi", 1, "neg_hi")
    return _write_pair(context.core, destination, compute, F32, low, high)


def _float_half(core: Core, instruction: Instruction, token: str, half: int, is_negated: int) -> Source:
    found = register(token)
    if found is not None:
        bank = "v" if found.is_vector else "s"
        # a registers follow the v registers, so v256 is a0.
        token = f"{bank}{found.index + half}"
    elif half:
        raise UnknownInstruction(f"the upper half of a constant in {instruction.text!r}")
    return vector_source(core, f"-{token}" if is_negated else token, F32)


def _write_pair(
    core: Core,
    destination: str,
    compute: Callable[..., Array],
    dtype: np.dtype[Any],
    low: list[Source],
    high: list[Source],
) -> Step:
    """low and high results to two registers; both are computed before either is written."""
    found = register(destination)
    assert found is not None
    writes = [VectorSink(core, f"v{found.index + half}", dtype).write for half in range(2)]

    def step() -> None:
        results = compute(*[read() for read in low]), compute(*[read() for read in high])
        for write, result in zip(writes, results, strict=True):
            write(result)

    return step


def _move(context: Context, instruction: Instruction) -> Step:
    """v_pk_mov_b32: the low result from the first source, the high one from the second, each by op_sel."""
    instruction.allow("op_sel", "op_sel_hi")
    halves = instruction.bits("op_sel", (0, 0))
    destination, *tokens = instruction.operands
    low, high = (
        _copy_of(_float_half(context.core, instruction, token, half, 0))
        for token, half in zip(tokens, halves, strict=True)
    )
    return _write_pair(context.core, destination, lambda a: a, F32, [low], [high])


def _copy_of(read: Source) -> Source:
    return lambda: read().copy()


def _halves(context: Context, instruction: Instruction) -> Step:
    dtype, compute = _PAIRS_OF_HALVES[instruction.name]
    instruction.allow("op_sel", "op_sel_hi", *(("neg_lo", "neg_hi") if dtype == F16 else ()))
    destination, *tokens = instruction.operands

    def sources(select: str, default: int, negate: str) -> list[Source]:
        halves = instruction.bits(select, (default,) * len(tokens))
        signs = instruction.bits(negate, (0,) * len(tokens))
        return [
            vector_source(context.core, f"neg({token})" if sign else token, dtype, high=bool(half))
            for token, half, sign in zip(tokens, halves, signs, strict=True)
        ]

    low, high = sources("op_sel", 0, "neg_lo"), sources("op_sel_hi", 1, "neg_hi")
    write = VectorSink(context.core, destination, U32).write

    def step() -> None:
        below, above = (compute(*[read() for read in reads]).view(U16).astype(U32) for reads in (low, high))
        write(below | above << np.uint32(16))

    return step


def _mixed_fma(context: Context, instruction: Instruction) -> Step:
    """a * b + c in float32, of sources that are 16 bits wide by op_sel_hi, with the half selected by op_sel.

    neg_hi stands for the absolute value here. The forms for a half leave the other half of the register unchanged.
    """
    instruction.allow("op_sel", "op_sel_hi", "neg_lo", "neg_hi")
    destination, *tokens = instruction.operands
    names = ("op_sel", "op_sel_hi", "neg_lo", "neg_hi")
    a, b, c = (
        _mixed_source(context.core, token, *flags)
        for token, *flags in zip(tokens, *(instruction.bits(name, (0, 0, 0)) for name in names), strict=True)
    )
    into = instruction.name.removeprefix("v_fma_mix")
    old = vector_source(context.core, destination, U32)
    write = VectorSink(context.core, destination, F32 if into == "_f32" else U32).write

    def step() -> None:
        result = fma(a(), b(), c())
        if into == "_f32":
            write(result)
            return
        half = result.astype(F16).view(U16).astype(U32)
        if into == "lo_f16":
            write(old() & np.uint32(0xFFFF0000) | half)
        else:
            write(old() & np.uint32(0xFFFF) | half << np.uint32(16))

    return step


def _mixed_source(core: Core, token: str, upper: int, is_half: int, is_negated: int, is_absolute: int) -> Source:
    token = f"|{token}|" if is_absolute else token
    token = f"-{token}" if is_negated else token
    if not is_half:
        return vector_source(core, token, F32)
    read = vector_source(core, token, F16, high=bool(upper))
    return lambda: read().astype(F32)


BUILDERS: dict[str, Builder] = {
    **dict.fromkeys(_PAIRS_OF_FLOATS, _floats),
    **dict.fromkeys(_PAIRS_OF_HALVES, _halves),
    "v_pk_mov_b32": _move,
    **dict.fromkeys(("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"), _mixed_fma),
}
