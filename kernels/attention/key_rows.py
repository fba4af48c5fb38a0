"""The places of a block's keys in pages: each key in a page of its own, or all of them in one.

Keys of one page have one page number, a scalar. The offset that a lane adds fits 32 bits then, whatever the size of
the pool: above 2 GiB too AMD's compiler keeps buffer loads, on gfx950 those straight to LDS, and has no 64-bit address
to compute for each key.
"""

import triton
import triton.language as tl
from triton import knobs
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.backend import on_nvidia
from rocm_attn.kernels.cache.layer_pages import NEAR

_NEAR = tl.constexpr(NEAR)


def lie_in_one_page(args: AttendArgs, key_block: int) -> bool:
    """True if the keys of every block lie in one page, near each other."""
    return args.pages.is_near and args.pages.format.page_size % key_block == 0


@constexpr_function
def are_read_by_page(in_one_page: bool) -> bool:
    """True if kernels read keys by page: if they lie in one, on AMD and under the interpreter. NVIDIA gains nothing."""
    return in_one_page and not on_nvidia()


@triton.jit
def pages_of_block(pages, block, lane, PAGE_SIZE: tl.constexpr, KEY_BLOCK: tl.constexpr, BY_PAGE: tl.constexpr):
    """Page numbers of a block's keys: [KEY_BLOCK], or one. The last page that may be read stands for later ones."""
    first = block * KEY_BLOCK
    if not BY_PAGE:
        first = first + lane
    return tl.load(pages.at + tl.minimum(first // PAGE_SIZE, pages.width - 1))


@constexpr_function
def pages_at_once(page_size: int, key_block: int) -> int:
    """Page numbers that are loaded for a block on NVIDIA: one per page if the block begins or ends with a page.

    If there are fewer than a program has threads, every thread loads those that it needs; otherwise they are passed
    through shared memory, at two barriers each.
    """
    target = None if knobs.runtime.interpret else current_target()
    is_whole = key_block % page_size == 0 or page_size % key_block == 0
    if is_whole and (target is None or target.backend == "cuda"):
        return max(1, key_block // page_size)
    return key_block


@triton.jit
def near(stride):
    """A stride of near pages: the compiler learns that offsets of a few of them fit 32 bits, and are not negative."""
    tl.assume(stride >= 0)
    tl.assume(stride < _NEAR)
    return tl.cast(stride, tl.int32)


@triton.jit
def offsets_in_page(lane, token, column):
    """Offsets of a block's elements from its first one, all in one page, int32 [keys, columns].

    token: stride between tokens; column: offset of each column in a token
    """
    return lane[:, None] * near(token) + column.to(tl.int32)[None, :]
