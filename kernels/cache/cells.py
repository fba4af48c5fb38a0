"""Where a token and an element of its row lie in a page, linear or vectorised: see page_rows.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def token_cell(offset, group_stride, GROUP_TOKENS: tl.constexpr):
    """From the beginning of a page to a token's first element in head 0. offset: the token's place in the page"""
    return (offset // GROUP_TOKENS) * group_stride + offset % GROUP_TOKENS


@triton.jit
def element_cell(d, vector_stride, VECTOR_ELEMENTS: tl.constexpr, GROUP_TOKENS: tl.constexpr, DIM: tl.constexpr):
    """From the first element of a row to element d of its DIM."""
    cell = d * GROUP_TOKENS
    # A row of one vector has no quotient: the compiler would not see that it is 0.
    if VECTOR_ELEMENTS < DIM:
        cell = (d // VECTOR_ELEMENTS).to(tl.int64) * vector_stride + (d % VECTOR_ELEMENTS) * GROUP_TOKENS
    return cell
