"""Powers of two by the unit of special functions and by products, in turn.

A capped score uses that unit twice, for its tanh and for its exponential, and then as long as its matrix products use
the matrix units. So some exponentials are computed by the many units for products, which would wait meanwhile:

    2^x = 2^n 2^f    n the integer next to x, f in [-1/2, 1/2], 2^f a polynomial of the third degree

The error is at most 7.5e-5 of the power, a twentieth of the largest error of rounding it to bfloat16. For NaN the
result is the largest float32, which is infinite in bfloat16: the output is not finite either, though the LSE may be.

The way ptxas mixes both kinds, and the tanh before them, depends on their order in the source.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

# The first ones of this many neighbours are computed by products.
_NEIGHBOURS = gl.constexpr(4)
_BY_UNIT = """
    mul.rn.f32 x, {x}, {scale};
    ex2.approx.ftz.f32 {power}, x;"""
# A sum with 1.5 * 2^23 has n in its lowest bits, which 23 places higher are those of an exponent.
_BY_PRODUCTS = """
    fma.rn.f32 x, {x}, {scale}, 0f4B400000;
    mov.b32 n, x;
    sub.rn.f32 x, x, 0f4B400000;
    neg.f32 x, x;
    fma.rn.f32 x, {x}, {scale}, x;
    fma.rn.f32 p, x, 0f3D61FB71, 0f3E786EF8;
    fma.rn.f32 p, p, x, 0f3F31798D;
    fma.rn.f32 p, p, x, 0f3F7FFB4A;
    mov.b32 m, p;
    shl.b32 n, n, 23;
    add.s32 m, m, n;
    mov.b32 {power}, m;"""


@constexpr_function
def _assembly(by_products):
    """Powers of _NEIGHBOURS numbers times a factor."""
    many = int(_NEIGHBOURS.value)
    lines = [
        (_BY_PRODUCTS if at < by_products else _BY_UNIT).format(
            power=f"${at}", x=f"${many + at}", scale=f"${2 * many + at}"
        )
        for at in range(many)
    ]
    return "{\n    .reg .f32 x, p;\n    .reg .b32 n, m;" + "".join(lines) + "\n}"


@gluon.jit
def scaled_powers(x, scale, BY_PRODUCTS: gl.constexpr):
    """2^(x scale), whose exponents are from -126 to 127. BY_PRODUCTS: how many of four neighbours are"""
    if BY_PRODUCTS > 0:
        ASSEMBLY: gl.constexpr = _assembly(BY_PRODUCTS)
        powers = gl.inline_asm_elementwise(
            ASSEMBLY, "=f,=f,=f,=f,f,f,f,f,f,f,f,f", [x, scale], dtype=gl.float32, is_pure=True, pack=_NEIGHBOURS
        )
    else:
        powers = gl.exp2(x * scale)
    return powers
