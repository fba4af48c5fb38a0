"""Writes new keys and values to their slots.

    k_pages[slot // page_size, slot % page_size] = k[token]      likewise v

Pages are linear or vectorised (page_rows.py): two compilations of one kernel. In eight-bit pages an element is stored
as the code that is nearest to its value divided by its scale (codes.py). Scales of a layer or of heads are read; the
scale of a token is made here, so that the token's largest element has the largest code. Records (records.py) have a
kernel of their own, which makes the scales of their groups.

Tokens at or past num_tokens, slots of page 0 if it belongs to no sequence, and negative slots are dropped: a pad's
hidden state may be NaN, and page 0 stays zero. An infinity or NaN in a token that is stored is stored as 0 and sets a
bit of the step's error word: attention multiplies the V of keys that a token does not see by a probability of 0,
and 0 * inf is NaN.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.cache.cells import CellGeometry, element_cell, token_cell
from rocm_attn.kernels.cache.codes import (
    HEAD_SCALES,
    LAYER_SCALES,
    NO_SCALES,
    TOKEN_SCALES,
    as_bfloat16,
    encoded,
    is_coded,
    scale_of_rows,
    scales_of,
    store_groups,
)
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.launch import launch, only_launches
from rocm_attn.kernels.metadata import error_word

_ERROR_WORD = tl.constexpr(error_word.ERROR_WORD)
_NOT_FINITE = tl.constexpr(error_word.NOT_FINITE)
# From this number of programs on, the bytes that a program moves decide, and below it the time that it takes.
_MANY_PROGRAMS = 512


@triton.jit
def _finite_row(row):
    """Returns a row with 0 instead of values that are not finite, and whether each head had any of those."""
    finite = tl.abs(row.to(tl.float32)) < float("inf")
    return tl.where(finite, row, 0.0), tl.max((~finite).to(tl.int32), 1)


@triton.jit
def _given_scale(scale, head, G: tl.constexpr):
    """The scales that rows are divided by, if they are given: one, or [HEADS_BLOCK, 1]. head: int64 of this shape"""
    scale_value = 1.0
    if G.SCALES == LAYER_SCALES:
        scale_value = tl.load(scale)
    elif G.SCALES == HEAD_SCALES:
        scale_value = tl.load(scale + head, mask=head < G.HEADS, other=1.0)
    return scale_value


@triton.jit
def _in_pages(row, scale_value, scale, head, first_scale, G: tl.constexpr):
    """Returns a finite row [HEADS_BLOCK, elements] as its pages hold it.

    scale_value:      the result of _given_scale
    scale:            the scales of tokens, which are written, or others, or None; head: int64 [HEADS_BLOCK, 1]
    first_scale: the place of the token's scale in the first head
    """
    if not is_coded(G.ENCODING):
        elements = row
    elif G.SCALES == NO_SCALES:
        elements = encoded(row.to(tl.float32), G.ENCODING)
    else:
        row = row.to(tl.float32)
        if G.SCALES == TOKEN_SCALES:
            scale_value = scale_of_rows(row, G.ENCODING)[:, None]
            tl.store(scale + first_scale + head * G.PAGE_SIZE, scale_value, mask=head < G.HEADS)
        # One quotient per row, rounded as torch rounds it.
        elements = encoded(row * tl.div_rn(1.0, scale_value), G.ENCODING)
    return elements


@triton.jit
def _store_kernel(
    k,
    v,
    slot_of_token,
    counts,
    k_pages,
    v_pages,
    k_scale,
    v_scale,
    k_token,
    k_head,
    v_token,
    v_head,
    kp_page,
    kp_group,
    kp_head,
    kp_vector,
    vp_page,
    vp_group,
    vp_head,
    vp_vector,
    G: tl.constexpr,
    FIRST_SLOT: tl.constexpr,
):
    token = tl.program_id(0)
    slot = tl.load(slot_of_token + token).to(tl.int64)
    if (token < tl.load(counts + 1)) & (slot >= FIRST_SLOT):
        t = token.to(tl.int64)
        page = slot // G.PAGE_SIZE
        offset = slot % G.PAGE_SIZE
        first_scale = page * (G.HEADS * G.PAGE_SIZE) + offset
        # head: [HEADS_BLOCK, 1]; k_d: [1, K_COLUMNS]; v_d: [1, V_COLUMNS]
        head = tl.program_id(1) * G.HEADS_BLOCK + tl.arange(0, G.HEADS_BLOCK)[:, None]
        # 64-bit before multiplying: HND layouts have head strides beyond int32.
        head64 = head.to(tl.int64)
        # All loads come before the first store, because no load could pass a store.
        k_d = tl.arange(0, G.K_COLUMNS)[None, :]
        is_k = (head < G.HEADS) & (k_d < G.K_DIM)
        k_row = tl.load(k + t * k_token + head64 * k_head + k_d, mask=is_k, other=0.0)
        k_scale_value = _given_scale(k_scale, head64, G)
        if G.HAS_V:
            v_d = tl.arange(0, G.V_COLUMNS)[None, :]
            is_v = (head < G.HEADS) & (v_d < G.V_DIM)
            v_row = tl.load(v + t * v_token + head64 * v_head + v_d, mask=is_v, other=0.0)
            v_scale_value = _given_scale(v_scale, head64, G)
        k_row, strange = _finite_row(k_row)
        heads = k_pages + page * kp_page + token_cell(offset, kp_group, G.K_TOKENS) + head64 * kp_head
        cell = element_cell(k_d, kp_vector, G.K_ELEMENTS, G.K_TOKENS, G.K_DIM)
        tl.store(heads + cell, _in_pages(k_row, k_scale_value, k_scale, head64, first_scale, G), mask=is_k)
        if G.HAS_V:
            v_row, v_strange = _finite_row(v_row)
            strange |= v_strange
            heads = v_pages + page * vp_page + token_cell(offset, vp_group, G.V_TOKENS) + head64 * vp_head
            cell = element_cell(v_d, vp_vector, G.V_ELEMENTS, G.V_TOKENS, G.V_DIM)
            tl.store(heads + cell, _in_pages(v_row, v_scale_value, v_scale, head64, first_scale, G), mask=is_v)
        if tl.max(strange, 0) > 0:
            tl.atomic_or(counts + _ERROR_WORD, _NOT_FINITE, sem="relaxed")


class RecordGeometry(NamedTuple):
    """The values that the store of records is compiled for.

    CODED, REST:                 elements that have codes, and those after them
    CODED_COLUMNS, REST_COLUMNS: with padding
    ENCODING, SCALES:            numbers of the codes' Encoding and of Scales
    NEARER:                      PageFormat.scales_nearer
    FIRST_SLOT:                  slots before it are dropped
    """

    PAGE_SIZE: int
    CODED: int
    CODED_COLUMNS: int
    REST: int
    REST_COLUMNS: int
    ENCODING: int
    SCALES: int
    NEARER: int
    FIRST_SLOT: int


@triton.jit
def _store_records_kernel(
    k,
    slot_of_token,
    counts,
    codes,
    scales,
    rest,
    k_token,
    page_bytes,
    token_bytes,
    G: tl.constexpr,
):
    token = tl.program_id(0)
    slot = tl.load(slot_of_token + token).to(tl.int64)
    if (token < tl.load(counts + 1)) & (slot >= G.FIRST_SLOT):
        row = k + token.to(tl.int64) * k_token
        offset = slot % G.PAGE_SIZE
        at = slot // G.PAGE_SIZE * page_bytes + offset * token_bytes
        # All loads come before the first store, because no load could pass a store.
        d = tl.arange(0, G.CODED_COLUMNS)[None, :]
        coded = tl.load(row + d, mask=d < G.CODED, other=0.0)
        if G.REST > 0:
            rest_d = tl.arange(0, G.REST_COLUMNS)[None, :]
            is_rest = rest_d < G.REST
            rest_row = tl.load(row + G.CODED + rest_d, mask=is_rest, other=0.0)
        coded, strange = _finite_row(coded)
        scales = scales_of(scales, at, offset, G.NEARER)
        store_groups(coded, codes + at, scales, G.CODED, G.ENCODING, G.SCALES)
        if G.REST > 0:
            rest_row, rest_strange = _finite_row(rest_row)
            strange |= rest_strange
            tl.store(rest + at // 2 + rest_d, as_bfloat16(rest_row), mask=is_rest)
        if tl.max(strange, 0) > 0:
            tl.atomic_or(counts + _ERROR_WORD, _NOT_FINITE, sem="relaxed")


@only_launches
def launch_store_kv(
    k: Tensor, v: Tensor, slot_of_token: Tensor, counts: Tensor, pages: LayerPages, *, null_page: bool = True
) -> None:
    """Writes k and v to the slots of their tokens; an infinity or NaN is stored as 0.

    k, v:          [T, kv_heads, head_dim | v_head_dim], any strides but the last; in a latent layer v is part of k, and
                   is not read
    slot_of_token: int32 [T]
    counts:        int32 [4]; [1] is num_tokens, [3] receives an error bit if a token was not finite
    pages:         linear, with any strides but the last, or vectorised; written in place, as are scales of tokens
    null_page:     whether page 0 belongs to no sequence
    """
    if pages.record is not None:
        _launch_records(k, slot_of_token, counts, pages, null_page)
        return
    geometry = CellGeometry.of(pages)
    grid = k.shape[0], triton.cdiv(geometry.HEADS, geometry.HEADS_BLOCK)
    launch(
        _store_kernel,
        grid,
        k,
        v,
        slot_of_token,
        counts,
        pages.raw_k,
        pages.raw_v,
        pages.k_scale,
        pages.v_scale,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *pages.keys.cells.stride()[:4],
        *pages.values.cells.stride()[:4],
        G=geometry,
        FIRST_SLOT=geometry.PAGE_SIZE if null_page else 0,
        num_warps=_warps(grid, geometry, pages.raw_k.element_size()),
    )


def _launch_records(k: Tensor, slot_of_token: Tensor, counts: Tensor, pages: LayerPages, null_page: bool) -> None:
    form, record = pages.format, pages.record
    assert record is not None
    rest = form.head_dim - form.coded
    geometry = RecordGeometry(
        form.page_size,
        form.coded,
        triton.next_power_of_2(form.coded),
        rest,
        triton.next_power_of_2(max(rest, 1)),
        form.encoding.number,
        form.scales.number,
        form.scales_nearer,
        form.page_size if null_page else 0,
    )
    strides = k.stride(0), *record.codes.stride()[:2]
    launch(_store_records_kernel, k.shape[:1], k, slot_of_token, counts, *record, *strides, G=geometry, num_warps=1)


def _warps(grid: tuple[int, int], geometry: CellGeometry, item_bytes: int) -> int:
    """Warps of a program: 4 if programs are few, else as many as take 32 bytes of K per thread.

    H200, llama8b, bfloat16 and scales of tokens: 64 tokens 1.84 and 1.88 us with 4 warps, 1.95 and 1.99 with 2; 2,048
    tokens 4.89 and 5.80 with 4 warps, 4.62 and 5.10 with 2, 5.23 and 5.03 with 1.
    """
    if grid[0] * grid[1] < _MANY_PROGRAMS:
        return 4
    return min(max(geometry.HEADS_BLOCK * geometry.K_COLUMNS * item_bytes // 1024, 1), 4)
