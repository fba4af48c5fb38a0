"""Matrix products D = A B + C; ISA chapter 7 "Matrix Arithmetic Instructions" and its tables of register layouts.

With M x M results and K products each: lane l holds K / (64 / M) consecutive values of row l % M of A, and likewise of
column l % M of B, from k = (l / M) * K / (64 / M) on. Register i of D and C in lane l is column l % M and row 4 (l /
16) + i for M = 16, 8 (i / 4) + 4 (l / 32) + i % 4 for M = 32. EXEC is ignored. "xf32" rounds float32 to 10 binary
digits. How is not documented; here the others are cut, which is the worst.

"f8f6f4" has two matrices of "fp8", or where cbsz is 1 an A, and where blgp is 1 a B, of "bf8". A lane holds 16
consecutive values from k = 16 (l / M) on, and 16 from K / 2 after that. The form with scales has two more operands: a
byte of lane l, which bits of op_sel (1) and op_sel_hi (2) choose, is the exponent, biased by 127, of a power of two for
32 consecutive values of row l % M of A, or column of B, from k = 32 (l / M) on; so most of them are other lanes'
values. 255 is NaN (CDNA4 ISA 7.4, the formats of OCP MX, and Triton's layouts of tl.dot_scaled, which run on MI355X).

Products are summed in float32 in NumPy's order; hardware's order and internal width are not documented. Those of "i8"
are summed in int32.
"""

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from rocm_lab.simulator.arrays import F32, I32, U32, Array
from rocm_lab.simulator.assembly import Instruction
from rocm_lab.simulator.core import LANES, Core
from rocm_lab.simulator.faults import UnknownInstruction
from rocm_lab.simulator.isa.convert import from_bfloat16
from rocm_lab.simulator.isa.eight_bits import numbers
from rocm_lab.simulator.isa.step import Builder, Context, Step
from rocm_lab.simulator.operands import Register, constant, register, vector_register


def _from_eight_bits(registers: Array, kind: str, arch: str) -> Array:
    return numbers(kind, arch)[registers.view(np.uint8)]


def _from_xf32(registers: Array) -> Array:
    return (registers & np.uint32(0xFFFFE000)).view(F32)


# From uint32 [lanes, registers] to float32 [lanes, values], or of "i8" to int32.
_DECODE: dict[str, Callable[[Array], Array]] = {
    "f32": lambda registers: registers.view(F32),
    "xf32": _from_xf32,
    "f16": lambda registers: registers.view(np.float16).astype(F32),
    "bf16": lambda registers: from_bfloat16(registers.view(np.uint16)),
    "i8": lambda registers: registers.view(np.int8).astype(I32),
}
_EIGHT_BITS = ("fp8", "bf8")
_SHAPES = (
    ("f32", ((32, 2), (16, 4))),
    ("xf32", ((32, 4), (16, 8))),
    ("f16", ((32, 8), (16, 16), (32, 16), (16, 32))),
    ("bf16", ((32, 8), (16, 16), (32, 16), (16, 32))),
    *((f"{a}_{b}", ((32, 16), (16, 32))) for a, b in product(_EIGHT_BITS, repeat=2)),
    ("f8f6f4", ((32, 64), (16, 128))),
    ("i8", ((32, 16), (16, 32), (32, 32), (16, 64))),
)
# Shapes with twice the depth are new with gfx950.
_GFX950_ONLY = (
    "32x32x16_f16",
    "16x16x32_f16",
    "32x32x16_bf16",
    "16x16x32_bf16",
    "f8f6f4",
    "32x32x32_i8",
    "16x16x64_i8",
)
_GFX942_ONLY = ("xf32",)


def _result_rows(size: int) -> Array:
    """int [registers, 64]: the row of D that a register holds in a lane; its column is lane % size."""
    lane = np.arange(LANES)[None]
    index = np.arange(size * size // LANES)[:, None]
    return 4 * (lane // 16) + index if size == 16 else 8 * (index // 4) + 4 * (lane // 32) + index % 4


def _multiply(context: Context, instruction: Instruction) -> Step:
    instruction.allow(*(_FORMATS if instruction.name.endswith("f8f6f4") else ()))
    return _product(context, instruction, instruction.name.removeprefix("v_mfma_"), scales=())


def _multiply_scaled(context: Context, instruction: Instruction) -> Step:
    instruction.allow("op_sel", "op_sel_hi", *_FORMATS)
    if "op_sel_hi" not in instruction.modifiers:
        raise UnknownInstruction(f"the default op_sel_hi of {instruction.text!r}")
    chosen = zip(instruction.bits("op_sel", (0, 0, 0)), instruction.bits("op_sel_hi", ()), strict=True)
    scales = tuple(
        (context.core.vector[vector_register(token).index], low + 2 * high)
        for token, (low, high) in zip(instruction.operands[4:6], chosen, strict=False)
    )
    return _product(context, instruction, instruction.name.removeprefix("v_mfma_scale_"), scales)


def _product(context: Context, instruction: Instruction, shape: str, scales: tuple[tuple[Array, int], ...]) -> Step:
    core = context.core
    runs = 2 if shape.endswith("f8f6f4") else 1
    found = re.fullmatch(r"[fi]32_(\d+)x\d+x(\d+)_(\w+)", shape)
    assert found is not None
    if instruction.name.endswith(_GFX950_ONLY if context.arch == "gfx942" else _GFX942_ONLY):
        raise UnknownInstruction(f"{instruction.name} on {context.arch}")
    size, depth = int(found[1]), int(found[2])
    decoders = _decoders(instruction, found[3], context.arch)
    dtype = np.dtype(I32 if found[3] == "i8" else F32)
    result, a, b = (vector_register(token) for token in instruction.operands[:3])
    rows, columns = _result_rows(size), np.arange(LANES)[None] % size
    read_c = _accumulator(core, instruction.operands[3], dtype)
    into = core.vector[result.index : result.index + result.count].view(dtype)

    def step() -> None:
        sources = [
            _matrix(core, each, size, depth, runs, decode) for each, decode in zip((a, b), decoders, strict=True)
        ]
        for source, (scale, byte) in zip(sources, scales, strict=bool(scales)):
            source *= _powers(scale >> np.uint32(8 * byte), size, depth)
        into[:] = (sources[0] @ sources[1].T)[rows, columns] + read_c()

    return step


# The modifiers of "f8f6f4" that say what A and B hold.
_FORMATS = ("cbsz", "blgp")


def _decoders(instruction: Instruction, kinds: str, arch: str) -> list[Callable[[Array], Array]]:
    """Those of A and of B."""
    if kinds in _DECODE:
        return [_DECODE[kinds]] * 2
    names = kinds.split("_")
    if kinds == "f8f6f4":
        formats = [instruction.number(modifier) for modifier in _FORMATS]
        if any(each >= len(_EIGHT_BITS) for each in formats):
            raise UnknownInstruction(f"six and four bits of {instruction.text!r}")
        names = [_EIGHT_BITS[each] for each in formats]
    return [partial(_from_eight_bits, kind=name, arch=arch) for name in names]


def _matrix(core: Core, found: Register, size: int, depth: int, runs: int, decode: Callable[[Array], Array]) -> Array:
    """[size, depth] from the registers of A; from those of B its transpose. runs: of consecutive values in a lane"""
    registers = np.ascontiguousarray(core.vector[found.index : found.index + found.count].T)
    groups = LANES // size
    values = decode(registers).reshape(groups, size, runs, depth // groups // runs)
    return values.transpose(1, 2, 0, 3).reshape(size, depth)


def _powers(scale: Array, size: int, depth: int) -> Array:
    """float32 [size, depth]: the powers of two of _matrix's values, from the scales of all lanes."""
    exponent = (scale & 0xFF).astype(np.int32)
    power = np.where(exponent == 255, np.nan, np.ldexp(np.ones(LANES), exponent - 127)).astype(F32)
    return np.repeat(power.reshape(LANES // size, size).T, depth * size // LANES, axis=1)


def _accumulator(core: Core, token: str, dtype: np.dtype[Any]) -> Callable[[], Array]:
    found = register(token)
    if found is None:
        value = np.array([constant(token, U32)], np.uint32).view(dtype)
        return lambda: value
    values = core.vector[found.index : found.index + found.count].view(dtype)
    return lambda: values


BUILDERS: dict[str, Builder] = {
    **{
        f"v_mfma_{'i' if kind == 'i8' else 'f'}32_{size}x{size}x{depth}_{kind}": _multiply
        for kind, shapes in _SHAPES
        for size, depth in shapes
    },
    **{
        f"v_mfma_scale_f32_{size}x{size}x{depth}_{kind}": _multiply_scaled
        for kind, shapes in _SHAPES
        for size, depth in shapes
        if kind == "f8f6f4"
    },
}
