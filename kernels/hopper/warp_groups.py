"""Ends a warp group.

Triton lets a warp group that is done wait for more work, in a loop. At its head ptxas then finds several numbers of
registers, and waits after each matrix product (C7512). A kernel whose warp groups have one task each ends them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def leave():
    """Ends these threads. No code after it is reached, by none of the program's warp groups."""
    gl.inline_asm_elementwise(
        "exit; mov.u32 $0, $1;", "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
    )
