"""Converts eight-bit codes to numbers and back, exactly, on every target and under the interpreter.

    value of a code: (-1)^sign * 2^(exponent - bias) * (1 + mantissa / 2^m);  exponent 0: 2^(1 - bias) * mantissa / 2^m

                 exponent bits, m    bias    largest    NaN           source
    E4M3FN       4, 3                7       448        0x7f, 0xff    OCP OFP8 specification, revision 1.0
    E4M3FNUZ     4, 3                8       240        0x80          gfx942's instruction set: no negative zero
    E5M2         5, 2                15      57344      like float16  OCP OFP8 specification: float16 cut short

A number becomes the nearest code, or the even one of two equally near; beyond the largest it becomes the largest. Every
code that is a number is exact in bfloat16, float16 and float32.

If a target has an instruction for an encoding, it is used; otherwise integer arithmetic does the same, bit for bit.
Triton's own casts are used for nothing else: on AMD some take 40 instructions per element (3.6 to 3.9), on sm_90 the
cast to bfloat16 takes one of a sixteenth of the rate, E4M3FNUZ is missing, and casts that gfx950 lacks end the process.
"""

import triton
import triton.language as tl
from triton import knobs
from triton.language.target_info import current_target, is_cuda
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.cache.page_format import RECORDS, Encoding, Scales
from rocm_attn.kernels.cache.records import LARGEST_OF_GROUP

_E4M3FN = tl.constexpr(Encoding.E4M3FN.number)
_E4M3FNUZ = tl.constexpr(Encoding.E4M3FNUZ.number)
_E5M2 = tl.constexpr(Encoding.E5M2.number)
NO_SCALES = tl.constexpr(Scales.NONE.number)
LAYER_SCALES = tl.constexpr(Scales.LAYER.number)
HEAD_SCALES = tl.constexpr(Scales.HEAD.number)
TOKEN_SCALES = tl.constexpr(Scales.TOKEN.number)
_LARGEST = {encoding.number: encoding.largest for encoding in Encoding}
# Smallest normal exponent, and mantissa bits.
_FIELDS = {Encoding.E4M3FN.number: (-6, 3), Encoding.E4M3FNUZ.number: (-7, 3), Encoding.E5M2.number: (-14, 2)}
_OCP = (Encoding.E4M3FN.number, Encoding.E5M2.number)
# PTX for two pairs in a word: the first codes next to each other, the second ones, and both as float16.
_PAIRS_AS_HALF = {
    number: f"""{{
        .reg .b32 sorted;
        .reg .b16 first, second;
        prmt.b32 sorted, $2, $2, 0x3120;
        mov.b32 {{first, second}}, sorted;
        cvt.rn.f16x2.{name}x2 $0, first;
        cvt.rn.f16x2.{name}x2 $1, second;
    }}"""
    for number, name in ((Encoding.E4M3FN.number, "e4m3"), (Encoding.E5M2.number, "e5m2"))
}
_TYPES = {
    Encoding.E4M3FN.number: tl.float8e4nv,
    Encoding.E4M3FNUZ.number: tl.float8e4b8,
    Encoding.E5M2.number: tl.float8e5,
}
# A row of smaller values has this scale: its reciprocal, and the product of both with any code, stay normal.
_SMALLEST_SCALE = tl.constexpr(2.0**-100)
_RECORDS = {scales.number: layout for scales, layout in RECORDS.items()}


@constexpr_function
def is_coded(encoding: int) -> bool:
    """True if elements of an encoding are codes."""
    return encoding in _FIELDS


@constexpr_function
def is_record(scales: int) -> bool:
    """True if rows with scales of this kind are records."""
    return scales in _RECORDS


@constexpr_function
def group_of(scales: int) -> int:
    """Codes of a record that share a scale."""
    return _RECORDS[scales].group


@constexpr_function
def _smallest_group_scale(scales: int) -> float:
    return _RECORDS[scales].smallest_scale


@constexpr_function
def _largest(encoding: int) -> float:
    return _LARGEST[encoding]


@constexpr_function
def _largest_of_group(encoding: int) -> float:
    return LARGEST_OF_GROUP[encoding]


@constexpr_function
def _type(encoding: int) -> tl.dtype:
    return _TYPES[encoding]


@constexpr_function
def _pairs_as_half(encoding: int) -> str:
    return _PAIRS_AS_HALF[encoding]


@constexpr_function
def _denormal(encoding: int) -> float:
    """A float32 whose last place is worth the smallest code."""
    smallest, mantissa = _FIELDS[encoding]
    return 2.0 ** (smallest - mantissa + 23)


@constexpr_function
def _field(encoding: int, name: str) -> int:
    """Integers of the arithmetic on float32 bits, where a magnitude m becomes (m + rebias + its rounding) >> dropped.

    first_normal:   bits of the smallest normal number
    denormal_bits:  bits of _denormal
    rebias, dropped: see above; rebias is modulo 2^32 and holds the half that rounds
    """
    smallest, mantissa = _FIELDS[encoding]
    dropped = 23 - mantissa
    values = {
        "first_normal": (smallest + 127) << 23,
        "denormal_bits": (smallest - mantissa + 23 + 127) << 23,
        "rebias": ((1 - smallest - 127) * (1 << 23) + (1 << (dropped - 1)) - 1) % (1 << 32),
        "dropped": dropped,
    }
    return values[name]


@constexpr_function
def _is_read_by_hardware(encoding: int) -> bool:
    """True if the target's hardware turns codes into float32, two at a time."""
    target = None if knobs.runtime.interpret else current_target()
    if target is None:
        return False
    if target.backend == "cuda":
        return encoding in _OCP and target.arch >= 89
    return encoding in {"gfx942": (Encoding.E4M3FNUZ.number,), "gfx950": _OCP}.get(target.arch, ())


@constexpr_function
def _is_written_by_hardware(encoding: int) -> bool:
    """True if the target's hardware turns float32 into codes, and Triton 3.6 knows the instruction."""
    target = None if knobs.runtime.interpret else current_target()
    if target is None:
        return False
    if target.backend == "cuda":
        return encoding in _OCP and target.arch >= 89
    return encoding == Encoding.E4M3FNUZ.number and target.arch == "gfx942"


@triton.jit
def _as_dtype(numbers, DTYPE: tl.constexpr):
    """float32 numbers in DTYPE, which has them exactly. For bfloat16 they are cut, which needs no rounding."""
    if tl.bfloat16 == DTYPE:
        result = (numbers.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = numbers.to(DTYPE)
    return result


@triton.jit
def _half(codes, ENCODING: tl.constexpr):
    """Codes as float16, by arithmetic."""
    bits = codes.to(tl.uint16)
    if ENCODING == _E5M2:
        half = (bits << 8).to(tl.float16, bitcast=True)
    else:
        # The exponent's low bits are in place, and a product corrects its bias, which is exact for denormals too.
        magnitude = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        if ENCODING == _E4M3FN:
            half = tl.where((bits & 0x7F) == 0x7F, float("nan"), magnitude * 256.0)
        else:
            half = tl.where(bits == 0x80, float("nan"), magnitude * 128.0)
    return half.to(tl.float16)


@triton.jit
def decoded(elements, ENCODING: tl.constexpr, DTYPE: tl.constexpr):
    """Codes (uint8) as DTYPE, exactly, NaN codes as NaN; elements of another encoding unchanged."""
    if not is_coded(ENCODING):
        result = elements
    elif _is_read_by_hardware(ENCODING):
        F8: tl.constexpr = _type(ENCODING)
        # Triton 3.6 has no gfx950 instruction straight to float16, and takes 26 per element.
        IS_DIRECT: tl.constexpr = tl.float16 == DTYPE and is_cuda()
        if IS_DIRECT:
            result = elements.to(F8, bitcast=True).to(DTYPE)
        else:
            result = _as_dtype(elements.to(F8, bitcast=True).to(tl.float32), DTYPE)
    elif tl.float16 == DTYPE:
        result = _half(elements, ENCODING)
    else:
        result = _as_dtype(_half(elements, ENCODING).to(tl.float32), DTYPE)
    return result


@triton.jit
def decoded_pairs(pairs, ENCODING: tl.constexpr):
    """Codes in pairs (uint16) as float16: the first of each, and the second."""
    if _is_read_by_hardware(ENCODING) and is_cuda():
        ASSEMBLY: tl.constexpr = _pairs_as_half(ENCODING)
        first, second = tl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        first = decoded((pairs & 0xFF).to(tl.uint8), ENCODING, tl.float16)
        second = decoded((pairs >> 8).to(tl.uint8), ENCODING, tl.float16)
    return first, second


@triton.jit
def encoded(x, ENCODING: tl.constexpr):
    """Finite or infinite float32 as codes (uint8): rounded to the nearest, beyond the largest to the largest."""
    LARGEST: tl.constexpr = _largest(ENCODING)
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    if _is_written_by_hardware(ENCODING):
        F8: tl.constexpr = _type(ENCODING)
        codes = x.to(F8).to(tl.uint8, bitcast=True)
    else:
        codes = _encoded_by_arithmetic(x, ENCODING)
    return codes


@triton.jit
def _encoded_by_arithmetic(x, ENCODING: tl.constexpr):
    """float32 no larger than the largest code's value, as codes."""
    FIRST_NORMAL: tl.constexpr = _field(ENCODING, "first_normal")
    DENORMAL: tl.constexpr = _denormal(ENCODING)
    DENORMAL_BITS: tl.constexpr = _field(ENCODING, "denormal_bits")
    REBIAS: tl.constexpr = _field(ENCODING, "rebias")
    DROPPED: tl.constexpr = _field(ENCODING, "dropped")
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # The sum rounds to the last place of DENORMAL, and to even, like all sums.
    small = (magnitude.to(tl.float32, bitcast=True) + DENORMAL).to(tl.uint32, bitcast=True) - DENORMAL_BITS
    normal = (magnitude + REBIAS + ((magnitude >> DROPPED) & 1)) >> DROPPED
    code = tl.where(magnitude < FIRST_NORMAL, small, normal)
    sign = (bits >> 24) & 0x80
    if ENCODING == _E4M3FNUZ:
        sign = tl.where(code == 0, 0, sign)
    return (code | sign).to(tl.uint8)


@triton.jit
def scale_of_rows(rows, ENCODING: tl.constexpr):
    """The scale of each row of finite float32 [rows, elements], with which its largest element has the largest code."""
    RECIPROCAL: tl.constexpr = 1.0 / _largest(ENCODING)
    return tl.maximum(tl.max(tl.abs(rows), 1) * RECIPROCAL, _SMALLEST_SCALE)


@triton.jit
def as_bfloat16(x):
    """Finite numbers as bfloat16: the nearest number, the even one of two. Triton's interpreter would cut them."""
    if x.dtype == tl.bfloat16:
        result = x
    else:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        result = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return result


@triton.jit
def store_groups(v, codes, scales, DIM: tl.constexpr, ENCODING: tl.constexpr, SCALES: tl.constexpr):
    """Writes the codes and the scales of a record (records.py).

    v: finite numbers [1, columns], 0 from DIM on; codes, scales: pointers to the first code and the first scale
    """
    GROUP: tl.constexpr = group_of(SCALES)
    GROUPS: tl.constexpr = v.shape[1] // GROUP
    LARGEST: tl.constexpr = _largest_of_group(ENCODING)
    groups = tl.reshape(v.to(tl.float32), [GROUPS, GROUP])
    least = tl.maximum(tl.div_rn(tl.max(tl.abs(groups), 1), LARGEST), _smallest_group_scale(SCALES))
    # The next power of two, by the bits of float32: an exponent is one more unless the mantissa is 0.
    exponent = (least.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    elements = encoded(groups * tl.div_rn(1.0, scale)[:, None], ENCODING)
    group = tl.arange(0, GROUPS)
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(codes + place, elements, mask=place < DIM)
    is_group = group * GROUP < DIM
    if scales.dtype.element_ty == tl.uint8:
        tl.store(scales + group, exponent.to(tl.uint8), mask=is_group)
    else:
        tl.store(scales + group, scale, mask=is_group)


@triton.jit
def scales_of(scales, at, offset, NEARER: tl.constexpr):
    """Pointers to the first scales of records.

    scales: to that of page 0's first record; at: bytes from this record to each, int64; offset: places in their pages
    NEARER: PageFormat.scales_nearer
    """
    return scales + (at - offset * NEARER) // (scales.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def group_scales(scales):
    """Scales of records as float32: unchanged, or powers of two, by their exponents (records.py)."""
    if scales.dtype == tl.uint8:
        # The exponent's place in float32; 2^-127 lies below its normal numbers.
        bits = tl.where(scales == 0, 1 << 22, scales.to(tl.int32) << 23)
        result = tl.where(scales == 255, float("nan"), bits.to(tl.float32, bitcast=True))
    else:
        result = scales
    return result
