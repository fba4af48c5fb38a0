"""Conversions between floats and eight bits; ISA sections 12.8 and 12.10 (VOP1, VOP3), and LLVM's of gfx950.

"fp8" has three bits after the first one and "bf8" two. On gfx942 they are the FNUZ formats: the bias is one more, 0x80
is the only NaN, and there is no infinity and no negative zero. On gfx950 they are those of the Open Compute Project.
"""

from functools import cache, partial

import numpy as np

from rocm_lab.simulator.arrays import F16, F32, U16, U32, U64, Array
from rocm_lab.simulator.assembly import Instruction
from rocm_lab.simulator.faults import UnknownInstruction
from rocm_lab.simulator.isa.convert import from_bfloat16, to_bfloat16, to_float16
from rocm_lab.simulator.isa.step import Builder, Context, Step
from rocm_lab.simulator.isa.vector import VectorOp, build
from rocm_lab.simulator.operands import Source, VectorSink, vector_register, vector_source

_FRACTION_BITS = {"fp8": 3, "bf8": 2}


@cache
def numbers(kind: str, arch: str) -> Array:
    """float32 [256]: what each code is worth."""
    fraction_bits, is_fnuz = _FRACTION_BITS[kind], arch == "gfx942"
    code = np.arange(256)
    exponent, fraction = code >> fraction_bits & (127 >> fraction_bits), code & ((1 << fraction_bits) - 1)
    bias = (1 << (6 - fraction_bits)) - 1 + is_fnuz
    first = np.where(exponent > 0, 1, 0)
    size = (first + fraction / 2.0**fraction_bits) * 2.0 ** (np.maximum(exponent, 1) - bias)
    worth = np.where(code & 128, -size, size)
    if is_fnuz:
        worth[128] = np.nan
    elif kind == "fp8":
        worth[[0x7F, 0xFF]] = np.nan
    else:
        last = exponent == 31
        worth[last] = np.where(fraction[last] > 0, np.nan, np.copysign(np.inf, worth[last]))
    return worth.astype(F32)


def codes(values: Array, kind: str, arch: str) -> Array:
    """uint32: the nearest codes of float32 values, the even one of two; NaN for too large values."""
    worth = numbers(kind, arch)[:128]
    finite = worth[np.isfinite(worth)].astype(np.float64)
    middles = (finite[1:] + finite[:-1]) / 2
    size = np.abs(values.astype(np.float64))
    above, below = np.searchsorted(middles, size, side="right"), np.searchsorted(middles, size, side="left")
    nearest = np.where(above % 2 == 0, above, below)
    # Past the largest one by half a step: as MODE.FP16_OVFL is 0.
    too_large = ~(size <= finite[-1] + (finite[-1] - finite[-2]) / 2)
    nan = 0x80 if arch == "gfx942" else 0x7F
    overflow = 0x7C if kind == "bf8" and arch != "gfx942" else nan
    coded = np.where(np.isnan(values), nan, np.where(too_large, overflow, nearest))
    negative = np.signbit(values) & (coded != 0x80)
    if arch == "gfx942":
        negative &= coded != 0
    return (coded | negative * 128).astype(U32)


def _wide(kind: str, arch: str) -> VectorOp:
    """Two numbers from the low half of a register, or of the half that is chosen."""
    worth = numbers(kind, arch).view(U32)

    def compute(pair: Array) -> Array:
        low, high = worth[pair & 255], worth[pair >> 8]
        return low.astype(U64) | high.astype(U64) << np.uint64(32)

    return VectorOp(U64, (U16,), compute)


def _one(kind: str, arch: str) -> VectorOp:
    worth = numbers(kind, arch)
    return VectorOp(F32, (U32,), lambda register: worth[register & np.uint32(255)])


def _widen(context: Context, instruction: Instruction) -> Step:
    make = _wide if "_pk_" in instruction.name else _one
    return build(context, instruction, make(instruction.name[-3:], context.arch))


def _exponent(scale: Array) -> Array:
    """The exponent of float32 scales, whose other bits do not count."""
    return (scale.view(U32) >> np.uint32(23) & np.uint32(255)).astype(np.int32) - 127


def _has_scale(context: Context, instruction: Instruction) -> bool:
    is_scaled = "_scalef32_" in instruction.name
    if is_scaled and context.arch != "gfx950":
        raise UnknownInstruction(f"{instruction.name} on {context.arch}")
    return is_scaled


def _scaled(context: Context, instruction: Instruction) -> Step:
    """Two numbers in float32, float16 or bfloat16, times the power of two in the exponent of the scale."""
    assert _has_scale(context, instruction)
    wide, kind = instruction.name.split("_")[4:6]
    worth = numbers(kind, context.arch)

    def compute(pair: Array, scale: Array) -> Array:
        factor = np.ldexp(F32.type(1), _exponent(scale))
        low, high = worth[pair & 255] * factor, worth[pair >> 8] * factor
        if wide == "f32":
            return low.view(U32).astype(U64) | high.view(U32).astype(U64) << np.uint64(32)
        narrow = to_bfloat16 if wide == "bf16" else to_float16
        return narrow(low) | narrow(high) << np.uint32(16)

    return build(context, instruction, VectorOp(U64 if wide == "f32" else U32, (U16, F32), compute))


def _half(read: Source, kind: str, is_high: bool) -> Array:
    """float32 of a half of each register."""
    half = (read() >> np.uint32(16 * is_high)).astype(U16)
    return from_bfloat16(half) if kind == "bf16" else half.view(F16).astype(F32)


def _narrow(context: Context, instruction: Instruction) -> Step:
    """Two codes in a half of the destination, which op_sel chooses last; the other half stays.

    The numbers are two of float32, or those in the halves of a register. A scale, if there is one, divides them by the
    power of two in its exponent.
    """
    core, arch, (kind, wide) = context.core, context.arch, instruction.name.split("_")[-2:]
    has_scale = _has_scale(context, instruction)
    instruction.allow("op_sel")
    *unchosen, is_high = instruction.bits("op_sel", (0,) * len(instruction.operands))
    if any(unchosen):
        raise UnknownInstruction(f"op_sel of {instruction.text!r}")
    destination, *tokens = instruction.operands
    reads = [vector_source(core, token, F32) for token in tokens]
    if wide != "f32":
        reads[:1] = [partial(_half, vector_source(core, tokens[0], U32), wide, is_high) for is_high in (False, True)]
    held = core.vector[vector_register(destination).index]
    write = VectorSink(core, destination, U32).write
    shift, kept = np.uint32(16 * is_high), np.uint32(0x0000FFFF if is_high else 0xFFFF0000)

    def step() -> None:
        numbers = [read() for read in reads]
        if has_scale:
            exponent = -_exponent(numbers.pop())
            numbers = [np.ldexp(each, exponent) for each in numbers]
        low, high = (codes(each, kind, arch) for each in numbers)
        write(held & kept | (low | high << np.uint32(8)) << shift)

    return step


BUILDERS: dict[str, Builder] = {
    **{f"v_cvt_{form}f32_{kind}": _widen for form in ("", "pk_") for kind in _FRACTION_BITS},
    **{f"v_cvt_{form}pk_{kind}_f32": _narrow for form in ("", "scalef32_") for kind in _FRACTION_BITS},
    **{f"v_cvt_scalef32_pk_{kind}_{wide}": _narrow for wide in ("f16", "bf16") for kind in _FRACTION_BITS},
    **{f"v_cvt_scalef32_pk_{wide}_{kind}": _scaled for wide in ("f32", "f16", "bf16") for kind in _FRACTION_BITS},
}
