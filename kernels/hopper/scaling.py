"""Accumulators times a scale of each row, which is 1 most of the time: a warp with no other factor skips it.

A product takes one instruction per accumulator, and the loop has about seven for each score (machine code of heads of
128). Triton has no branch of one warp, so it is in a piece of assembly, which has all accumulators that a thread
holds.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function


@constexpr_function
def _assembly(many):
    """Assembly for `many` accumulators of a thread, which lie in two rows: pairs of neighbouring columns, of one row
    and then of the other.
    """
    # The factors come after the accumulators themselves, which share their registers with results.
    of_first, of_second = 2 * many, 2 * many + 2
    products = "".join(f"\n    mul.rn.f32 ${at}, ${at}, ${2 * many + at};" for at in range(many))
    return f"""{{
    .reg .pred scales, any;
    setp.neu.f32 scales, ${of_first}, 0f3F800000;
    setp.neu.or.f32 scales, ${of_second}, 0f3F800000, scales;
    vote.sync.any.pred any, scales, 0xFFFFFFFF;
    @!any bra.uni AS_THEY_ARE;{products}
AS_THEY_ARE:
}}"""


@constexpr_function
def _operands(many):
    """Constraints of _assembly: results, accumulators in the same registers, factors."""
    return ",".join(["=f"] * many + [str(at) for at in range(many)] + ["f"] * many)


@gluon.jit
def times_if_any(acc, by_row):
    """acc [64, columns] of a warp group times by_row [64, 1]."""
    # A warp's tile is 16 rows, of which a thread has two.
    MANY: gl.constexpr = acc.shape[1] // 2
    ASSEMBLY: gl.constexpr = _assembly(MANY)
    OPERANDS: gl.constexpr = _operands(MANY)
    scale_values = by_row + gl.zeros_like(acc)
    return gl.inline_asm_elementwise(ASSEMBLY, OPERANDS, [acc, scale_values], dtype=gl.float32, is_pure=True, pack=MANY)
