"""The places of a token, and of an element of its row, in a page, linear or vectorised: see page_rows.py."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import PoolKind

# Elements of K or of V that a program holds.
_ELEMENTS = 4096


class CellGeometry(NamedTuple):
    """The values that a kernel which writes pages is compiled for.

    HEADS:                    KV heads; HEADS_BLOCK: those of a program
    K_DIM, V_DIM:             elements of a row; K_COLUMNS, V_COLUMNS: with padding
    K_ELEMENTS, V_ELEMENTS:   elements of a vector of a row
    K_TOKENS, V_TOKENS:       tokens of a group
    HAS_V:                    whether V has memory of its own; V of latent pages is part of K
    ENCODING, SCALES:         numbers of Encoding and Scales
    """

    PAGE_SIZE: int
    HEADS: int
    HEADS_BLOCK: int
    K_DIM: int
    V_DIM: int
    K_COLUMNS: int
    V_COLUMNS: int
    K_ELEMENTS: int
    K_TOKENS: int
    V_ELEMENTS: int
    V_TOKENS: int
    HAS_V: bool
    ENCODING: int
    SCALES: int

    @classmethod
    def of(cls, pages: LayerPages) -> CellGeometry:
        """The geometry of a layer's pages."""
        form, keys, values = pages.format, pages.keys, pages.values
        heads, dims = form.num_kv_heads, (keys.dim, values.dim)
        k_columns, v_columns = map(triton.next_power_of_2, dims)
        return cls(
            PAGE_SIZE=form.page_size,
            HEADS=heads,
            HEADS_BLOCK=max(1, min(triton.next_power_of_2(heads), _ELEMENTS // max(k_columns, v_columns))),
            K_DIM=dims[0],
            V_DIM=dims[1],
            K_COLUMNS=k_columns,
            V_COLUMNS=v_columns,
            K_ELEMENTS=keys.vector_elements,
            K_TOKENS=keys.group_tokens,
            V_ELEMENTS=values.vector_elements,
            V_TOKENS=values.group_tokens,
            HAS_V=form.kind is not PoolKind.LATENT,
            ENCODING=form.encoding.number,
            SCALES=form.scales.number,
        )


@triton.jit
def token_cell(offset, group_stride, GROUP_TOKENS: tl.constexpr):
    """Offset of a token's first element in head 0 from the page's beginning. offset: the token's place in the page"""
    return (offset // GROUP_TOKENS) * group_stride + offset % GROUP_TOKENS


@triton.jit
def element_cell(d, vector_stride, VECTOR_ELEMENTS: tl.constexpr, GROUP_TOKENS: tl.constexpr, DIM: tl.constexpr):
    """Offset of element d of a row's DIM from the row's first element."""
    cell = d * GROUP_TOKENS
    # A row of one vector needs no quotient: the compiler would not see that it is 0.
    if VECTOR_ELEMENTS < DIM:
        cell = (d // VECTOR_ELEMENTS).to(tl.int64) * vector_stride + (d % VECTOR_ELEMENTS) * GROUP_TOKENS
    return cell
