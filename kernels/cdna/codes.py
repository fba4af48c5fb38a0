"""Words of memory as elements, and numbers as sums of eight-bit codes that FP8 products take."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.cache.codes import decoded, is_coded
from rocm_attn.kernels.cache.page_format import Coding


@constexpr_function
def in_word(coding: Coding) -> int:
    """Elements of a word of 4 bytes."""
    return 4 if is_coded(coding.ENCODING) else 2


@constexpr_function
def code_of(version: int) -> gl.constexpr:
    """The dtype of codes that CDNA 3 or 4 reads."""
    return gl.float8e4b8 if version == 3 else gl.float8e4nv


@constexpr_function
def largest_exponent(version: int) -> int:
    """The exponent of the largest power of two that is a code: codes go to 240 or 448."""
    return 7 if version == 3 else 8


@constexpr_function
def _moved_exponent(version: int) -> int:
    """The exponent of the largest element of q as codes: one less than the largest, since an element may be nearly
    twice its power of two."""
    return int(largest_exponent(version) - 1)


@gluon.jit
def elements_of(words, DTYPE: gl.constexpr):
    """The elements of words in DTYPE, of 8 or 16 bits; those of a word are further dims of two."""
    elements = gl.join(words.to(gl.uint16), (words >> 16).to(gl.uint16))
    if DTYPE.primitive_bitwidth == 8:
        elements = gl.join(elements.to(gl.uint8), (elements >> 8).to(gl.uint8))
    return elements.to(DTYPE, bitcast=True)


@gluon.jit
def numbers_of(codes, DTYPE: gl.constexpr, CODING: gl.constexpr, CONVERTS: gl.constexpr):
    """Codes (uint8) as DTYPE, exactly, without their scale. CONVERTS: of ExtendUnits"""
    return codes.to(code_of(4), bitcast=True).to(DTYPE) if CONVERTS else decoded(codes, CODING.ENCODING, DTYPE)


@gluon.jit
def moved_to_codes(numbers, exponent, VERSION: gl.constexpr):
    """float32 numbers times the power of two that moves the largest ones to the largest codes.

    exponent: exponent_to_move of the largest ones
    """
    return numbers * ((254 + _moved_exponent(VERSION) - exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def scale_of_codes(exponent, VERSION: gl.constexpr):
    """The factor of products with what moved_to_codes returns."""
    return ((exponent - _moved_exponent(VERSION)) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def parts_of(numbers, NUM: gl.constexpr, VERSION: gl.constexpr):
    """float32 numbers as NUM codes each, whose sum they are in 4 * NUM bits. A part of NaN or infinity is NaN."""
    codes = ()
    for i in gl.static_range(NUM):
        first = numbers
        if i + 1 < NUM:
            first = (numbers.to(gl.uint32, bitcast=True) & 0xFFF00000).to(gl.float32, bitcast=True)
            numbers -= first
        codes += (first.to(code_of(VERSION)),)  # type: ignore[assignment]
    return codes
