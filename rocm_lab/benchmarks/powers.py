"""A kernel that computes only powers of two, to measure the rate of a GPU for them."""

import triton
import triton.language as tl

LANES = 1024  # of each program
POWERS = 4096  # of each lane, one after another


@triton.jit
def powers_kernel(out, LANES: tl.constexpr, POWERS: tl.constexpr):
    """out: [programs * LANES] float32, what came of the powers, so that no compiler leaves them out"""
    x = tl.arange(0, LANES).to(tl.float32)
    for _ in range(POWERS):
        x = tl.exp2(-x)
    tl.store(out + tl.program_id(0) * LANES + tl.arange(0, LANES), x)
