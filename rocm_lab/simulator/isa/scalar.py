"""Scalar arithmetic; ISA sections 12.1 to 12.4 (SOP2, SOPK, SOP1, SOPC).

A row has the widths of the result and the sources, the function of unsigned numbers, and the effect on SCC. Results are
cut to their width when they are written.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass

from rocm_lab.simulator.assembly import Instruction
from rocm_lab.simulator.core import EXEC, Core
from rocm_lab.simulator.isa.step import Builder, Context, Step
from rocm_lab.simulator.operands import scalar_register, scalar_source

_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1


def signed(value: int, bits: int = 32) -> int:
    """The low bits of value as a number in two's complement."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


@dataclass(frozen=True, slots=True)
class _Op:
    """compute: from the sources to the result. scc: None (kept), or from the written result and the sources."""

    result_bits: int
    source_bits: tuple[int, ...]
    compute: Callable[..., int]
    scc: Callable[..., bool] | None = None


def _not_zero(result: int, *sources: int) -> bool:
    return result != 0


def _op32(compute: Callable[..., int], count: int = 2, scc: Callable[..., bool] | None = None) -> _Op:
    return _Op(32, (32,) * count, compute, scc)


def _op64(compute: Callable[..., int], *source_bits: int, scc: Callable[..., bool] | None = None) -> _Op:
    return _Op(64, source_bits or (64, 64), compute, scc)


def _add_overflows(result: int, a: int, b: int) -> bool:
    return signed(a) + signed(b) != signed(result)


def _subtract_overflows(result: int, a: int, b: int) -> bool:
    return signed(a) - signed(b) != signed(result)


def _field(value: int, where: int) -> tuple[int, int]:
    """The field at bit where[4:0] with width where[22:16], and its width."""
    width = where >> 16 & 0x7F
    return value >> (where & 31) & ((1 << width) - 1), width


def _signed_field(value: int, where: int) -> int:
    field, width = _field(value, where)
    return signed(field, width) if width else 0


def _first_bit_unlike_the_sign(value: int) -> int:
    """Counts from the top; -1 if every bit equals the sign."""
    unlike = signed(value) ^ -(value >> 31)
    return 32 - unlike.bit_length() if unlike else -1


def _shift_add(shift: int) -> _Op:
    return _op32(lambda a, b: (a << shift) + b, scc=lambda r, a, b: (a << shift) + b > _MASK32)


_OPS: dict[str, _Op] = {
    "s_mov_b32": _op32(lambda a: a, 1),
    "s_mov_b64": _op64(lambda a: a, 64),
    "s_not_b32": _op32(operator.invert, 1, _not_zero),
    "s_not_b64": _op64(operator.invert, 64, scc=_not_zero),
    "s_brev_b32": _op32(lambda a: int(f"{a:032b}"[::-1], 2), 1),
    "s_abs_i32": _op32(lambda a: abs(signed(a)), 1, _not_zero),
    "s_sext_i32_i8": _op32(lambda a: signed(a, 8), 1),
    "s_sext_i32_i16": _op32(lambda a: signed(a, 16), 1),
    "s_bcnt1_i32_b32": _op32(lambda a: a.bit_count(), 1, _not_zero),
    "s_bcnt1_i32_b64": _Op(32, (64,), lambda a: a.bit_count(), _not_zero),
    "s_ff1_i32_b32": _op32(lambda a: (a & -a).bit_length() - 1, 1),
    "s_ff1_i32_b64": _Op(32, (64,), lambda a: (a & -a).bit_length() - 1),
    "s_flbit_i32_b32": _op32(lambda a: 32 - a.bit_length() if a else -1, 1),
    "s_flbit_i32_b64": _Op(32, (64,), lambda a: 64 - a.bit_length() if a else -1),
    "s_flbit_i32": _op32(_first_bit_unlike_the_sign, 1),
    "s_add_u32": _op32(operator.add, scc=lambda r, a, b: a + b > _MASK32),
    "s_sub_u32": _op32(operator.sub, scc=lambda r, a, b: b > a),
    "s_add_i32": _op32(operator.add, scc=_add_overflows),
    "s_sub_i32": _op32(operator.sub, scc=_subtract_overflows),
    "s_mul_i32": _op32(operator.mul),
    "s_mul_hi_u32": _op32(lambda a, b: a * b >> 32),
    "s_mul_hi_i32": _op32(lambda a, b: signed(a) * signed(b) >> 32),
    "s_min_i32": _op32(lambda a, b: min(signed(a), signed(b)), scc=lambda r, a, b: signed(a) < signed(b)),
    "s_max_i32": _op32(lambda a, b: max(signed(a), signed(b)), scc=lambda r, a, b: signed(a) > signed(b)),
    "s_min_u32": _op32(min, scc=lambda r, a, b: a < b),
    "s_max_u32": _op32(max, scc=lambda r, a, b: a > b),
    "s_and_b32": _op32(operator.and_, scc=_not_zero),
    "s_or_b32": _op32(operator.or_, scc=_not_zero),
    "s_xor_b32": _op32(operator.xor, scc=_not_zero),
    "s_andn2_b32": _op32(lambda a, b: a & ~b, scc=_not_zero),
    "s_orn2_b32": _op32(lambda a, b: a | ~b, scc=_not_zero),
    "s_and_b64": _op64(operator.and_, scc=_not_zero),
    "s_or_b64": _op64(operator.or_, scc=_not_zero),
    "s_xor_b64": _op64(operator.xor, scc=_not_zero),
    "s_andn2_b64": _op64(lambda a, b: a & ~b, scc=_not_zero),
    "s_orn2_b64": _op64(lambda a, b: a | ~b, scc=_not_zero),
    "s_lshl_b32": _op32(lambda a, b: a << (b & 31), scc=_not_zero),
    "s_lshr_b32": _op32(lambda a, b: a >> (b & 31), scc=_not_zero),
    "s_ashr_i32": _op32(lambda a, b: signed(a) >> (b & 31), scc=_not_zero),
    "s_lshl_b64": _op64(lambda a, b: a << (b & 63), 64, 32, scc=_not_zero),
    "s_lshr_b64": _op64(lambda a, b: a >> (b & 63), 64, 32, scc=_not_zero),
    "s_ashr_i64": _op64(lambda a, b: signed(a, 64) >> (b & 63), 64, 32, scc=_not_zero),
    **{f"s_lshl{shift}_add_u32": _shift_add(shift) for shift in (1, 2, 3, 4)},
    "s_bfe_u32": _op32(lambda a, b: _field(a, b)[0], scc=_not_zero),
    "s_bfe_i32": _op32(_signed_field, scc=_not_zero),
    "s_bfm_b32": _op32(lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
    "s_pack_ll_b32_b16": _op32(lambda a, b: (a & 0xFFFF) | b << 16),
    "s_pack_lh_b32_b16": _op32(lambda a, b: (a & 0xFFFF) | b >> 16 << 16),
    "s_pack_hh_b32_b16": _op32(lambda a, b: a >> 16 | b >> 16 << 16),
}

_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "lg": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}

# From the source and the old EXEC to the new one.
_SAVE_EXEC: dict[str, Callable[[int, int], int]] = {
    "s_and_saveexec_b64": operator.and_,
    "s_or_saveexec_b64": operator.or_,
    "s_xor_saveexec_b64": operator.xor,
    "s_andn2_saveexec_b64": lambda source, exec_mask: source & ~exec_mask,
    "s_orn2_saveexec_b64": lambda source, exec_mask: source | ~exec_mask,
}

# With a 16-bit constant, sign-extended, and the destination as the first source.
_WITH_CONSTANT: dict[str, _Op] = {
    "s_movk_i32": _op32(lambda a, constant: constant),
    "s_addk_i32": _op32(operator.add, scc=_add_overflows),
    "s_mulk_i32": _op32(operator.mul),
}


def _put(core: Core, index: int, bits: int, value: int) -> None:
    if bits == 64:
        core.write_pair(index, value)
    else:
        core.write_scalar(index, value)


def _arithmetic(context: Context, instruction: Instruction) -> Step:
    core, op = context.core, _OPS[instruction.name]
    destination, *tokens = instruction.operands
    index = scalar_register(destination).index
    reads = [scalar_source(core, token, bits) for token, bits in zip(tokens, op.source_bits, strict=True)]
    mask = (1 << op.result_bits) - 1

    def step() -> None:
        sources = [read() for read in reads]
        result = op.compute(*sources) & mask
        _put(core, index, op.result_bits, result)
        if op.scc is not None:
            core.scc = int(op.scc(result, *sources))

    return step


def _with_constant(context: Context, instruction: Instruction) -> Step:
    core, op = context.core, _WITH_CONSTANT[instruction.name]
    index = scalar_register(instruction.operands[0]).index
    constant = signed(int(instruction.operands[1], 0), 16)

    def step() -> None:
        before = int(core.scalar[index])
        result = op.compute(before, constant) & _MASK32
        core.write_scalar(index, result)
        if op.scc is not None:
            core.scc = int(op.scc(result, before, constant))

    return step


def _with_carry(context: Context, instruction: Instruction) -> Step:
    core = context.core
    index = scalar_register(instruction.operands[0]).index
    a, b = (scalar_source(core, token, 32) for token in instruction.operands[1:])
    sign = 1 if instruction.name == "s_addc_u32" else -1

    def step() -> None:
        result = a() + sign * (b() + core.scc)
        core.write_scalar(index, result)
        core.scc = int(not 0 <= result <= _MASK32)

    return step


def _select(context: Context, instruction: Instruction) -> Step:
    core, bits = context.core, int(instruction.name[-2:])
    index = scalar_register(instruction.operands[0]).index
    a, b = (scalar_source(core, token, bits) for token in instruction.operands[1:])
    return lambda: _put(core, index, bits, a() if core.scc else b())


def _compare(context: Context, instruction: Instruction) -> Step:
    core = context.core
    _, kind, condition, type_name = instruction.name.split("_")
    holds, bits = _COMPARISONS[condition], int(type_name[1:])
    a = scalar_source(core, instruction.operands[0], bits)
    if kind == "cmpk":
        constant = int(instruction.operands[1], 0) & 0xFFFF
        b = _constant(constant if type_name[0] == "u" else signed(constant, 16))
    else:
        b = scalar_source(core, instruction.operands[1], bits)

    def step() -> None:
        x, y = a(), b()
        core.scc = int(holds(signed(x), signed(y)) if type_name[0] == "i" else holds(x, y))

    return step


def _constant(value: int) -> Callable[[], int]:
    return lambda: value


def _test_bit(context: Context, instruction: Instruction) -> Step:
    core = context.core
    a, b = (scalar_source(core, token, 32) for token in instruction.operands)
    wanted = int(instruction.name == "s_bitcmp1_b32")

    def step() -> None:
        core.scc = int(a() >> (b() & 31) & 1 == wanted)

    return step


def _set_bit(context: Context, instruction: Instruction) -> Step:
    core, is_one = context.core, instruction.name == "s_bitset1_b32"
    index = scalar_register(instruction.operands[0]).index
    where = scalar_source(core, instruction.operands[1], 32)

    def step() -> None:
        bit, before = 1 << (where() & 31), int(core.scalar[index])
        core.write_scalar(index, before | bit if is_one else before & ~bit)

    return step


def _save_exec(context: Context, instruction: Instruction) -> Step:
    core, combine = context.core, _SAVE_EXEC[instruction.name]
    index = scalar_register(instruction.operands[0]).index
    read = scalar_source(core, instruction.operands[1], 64)

    def step() -> None:
        source, before = read(), core.read_pair(EXEC)
        core.write_pair(index, before)
        result = combine(source, before) & _MASK64
        core.write_pair(EXEC, result)
        core.scc = int(result != 0)

    return step


BUILDERS: dict[str, Builder] = {
    **dict.fromkeys(_OPS, _arithmetic),
    **dict.fromkeys(_WITH_CONSTANT, _with_constant),
    **dict.fromkeys(_SAVE_EXEC, _save_exec),
    **{
        f"s_{kind}_{condition}_{type_name}": _compare
        for condition in _COMPARISONS
        for kind, type_names in (("cmp", ("i32", "u32", "u64")), ("cmpk", ("i32", "u32")))
        for type_name in type_names
    },
    "s_bitcmp0_b32": _test_bit,
    "s_bitcmp1_b32": _test_bit,
    "s_bitset0_b32": _set_bit,
    "s_bitset1_b32": _set_bit,
    "s_addc_u32": _with_carry,
    "s_subb_u32": _with_carry,
    "s_cselect_b32": _select,
    "s_cselect_b64": _select,
}
