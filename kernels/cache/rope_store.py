"""Norms, rotary embedding and store of a layer's new tokens, in one launch: the work between its projections and
attention.

    q_out[token] = turn(norm(q[token]))
    k_pages[slot // page_size, slot % page_size] = turn(norm(k[token]))      v without a turn

The places, the encoding, the dropped tokens and the handling of numbers that are not finite are those of store.py. In a
latent layer a row is normalised at its front and turns at its end, and is stored once.

Sums and products are float32; a result is rounded once, to the dtype of the input. Every element is read by the warp
that writes it, and both elements of a pair by one lane: q_out may be q.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.cache.cells import element_cell, token_cell
from rocm_attn.kernels.cache.codes import (
    HEAD_SCALES,
    NO_SCALES,
    TOKEN_SCALES,
    as_bfloat16,
    encoded,
    is_coded,
    is_record,
    scale_of_rows,
    scales_of,
    store_groups,
)
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import Encoding, PageFormat, PoolKind, Scales
from rocm_attn.kernels.cache.page_rows import PageRows
from rocm_attn.kernels.cache.rope import RowGeometry, angles_at, places_of_pairs, turned, warps_in_place
from rocm_attn.kernels.cache.row_work import Projected, QkvWork, TokenPlaces
from rocm_attn.kernels.early import early_options, starts_early, wait_for_launch
from rocm_attn.kernels.launch import launch, only_launches
from rocm_attn.kernels.metadata import error_word
from rocm_attn.kernels.tuning.tiles import next_power_of_2

_ERROR_WORD = tl.constexpr(error_word.ERROR_WORD)
_NOT_FINITE = tl.constexpr(error_word.NOT_FINITE)

# Elements of a row's block that a program holds.
_ELEMENTS = 4096


class SideGeometry(NamedTuple):
    """Rows of q, of K or of V, and their destination.

    row:         how a row is cut
    HEADS:       rows of a token; HEADS_BLOCK: those of a program
    ELEMENTS:    elements of a vector of the row that is written
    TOKENS:      tokens of a group, between which its elements lie
    CHECKED:     whether a value that is not finite becomes 0
    ENCODING, SCALES: numbers of Encoding and Scales, of the written elements
    """

    row: RowGeometry
    HEADS: int
    HEADS_BLOCK: int
    ELEMENTS: int
    TOKENS: int
    CHECKED: bool
    ENCODING: int
    SCALES: int

    @property
    def blocks(self) -> int:
        """Programs for a token."""
        return -(-self.HEADS // self.HEADS_BLOCK)

    @property
    def num_warps(self) -> int:
        """Warps of a program that may write where it has read; see warps_in_place."""
        return warps_in_place(self.HEADS_BLOCK, self.row.PAIR_COLUMNS, self.row.REST_COLUMNS)


class RopeStoreGeometry(NamedTuple):
    """The values that the kernel is compiled for.

    q, k, v:   its sides; k and v do nothing if STORES is False, nor does v if LATENT
    Q_BLOCKS:  programs of a token for its q
    PAGE_SIZE: tokens of a page
    NEARER:    PageFormat.scales_nearer
    FIRST_SLOT: slots before it are dropped
    EARLY:     whether it starts early (early.py)
    """

    q: SideGeometry
    k: SideGeometry
    v: SideGeometry
    Q_BLOCKS: int
    STORES: bool
    LATENT: bool
    PAGE_SIZE: int
    NEARER: int
    FIRST_SLOT: int
    EARLY: bool


class Angles(NamedTuple):
    """Cosines and sines of a token's pairs, [1, PAIR_COLUMNS]."""

    cos: Any
    sin: Any


class RowTarget(NamedTuple):
    """The destination of rows: each head's first element [HEADS_BLOCK, 1], and the stride between vectors of a row.

    scale, first_scale: of pages that have codes: scales, and the place of the first head's scale
    scale_head:         stride from one head's to the next
    apart:              of records: where the elements begin that turn, bfloat16
    """

    at: Any
    vector: Any
    scale: Any
    first_scale: Any
    scale_head: Any
    apart: Any


@triton.jit
def _weights(weight, place, R: tl.constexpr):
    """The factors of normalised elements at places of a row."""
    return tl.load(weight + place, mask=place < R.NORM_DIM, other=0.0).to(tl.float32) + R.OFFSET


@triton.jit
def _rounded(x, mask, dtype: tl.constexpr, CHECKED: tl.constexpr):
    """float32 [HEADS_BLOCK, n] as dtype, 0 instead of values that are not finite; whether each head had such values."""
    value = x.to(dtype)
    finite = tl.abs(value.to(tl.float32)) < float("inf")
    if CHECKED:
        value = tl.where(finite, value, 0.0)
    return value, tl.max((mask & ~finite).to(tl.int32), 1)


@triton.jit
def _put(x, to, place, mask, reciprocal, S: tl.constexpr):
    """Writes elements to their places in rows, as codes if pages have codes: x times the reciprocal of its scale."""
    R: tl.constexpr = S.row
    element = x
    if is_coded(S.ENCODING):
        element = encoded(x.to(tl.float32) * reciprocal, S.ENCODING)
    tl.store(to.at + element_cell(place, to.vector, S.ELEMENTS, S.TOKENS, R.DIM), element, mask=mask)


@triton.jit
def _carry(rows, to, head, weight, angles, S: tl.constexpr):
    """Moves rows of a block of heads from one place to another, normalised and turned.

    rows:   [HEADS_BLOCK, 1], each head's first element
    to:     a RowTarget
    head:   [HEADS_BLOCK, 1]
    weight: of the norm, or None
    angles: Angles, not read if nothing turns
    Returns whether each head had values that are not finite, [HEADS_BLOCK].
    """
    R: tl.constexpr = S.row
    HEADS_BLOCK: tl.constexpr = S.HEADS_BLOCK
    ENCODING: tl.constexpr = S.ENCODING
    dtype: tl.constexpr = rows.dtype.element_ty
    is_head = head < S.HEADS
    strange = tl.zeros([HEADS_BLOCK], tl.int32)
    squares = tl.zeros([HEADS_BLOCK], tl.float32)
    scale_value = tl.zeros([HEADS_BLOCK], tl.float32)
    if R.REST > 0:
        lane = tl.arange(0, R.REST_COLUMNS)[None, :]
        place = R.REST_FIRST + lane
        is_rest = is_head & (lane < R.REST)
        rest = tl.load(rows + place, mask=is_rest, other=0.0).to(tl.float32)
        if R.NORM_DIM > 0:
            squares += tl.sum(tl.where(place < R.NORM_DIM, rest * rest, 0.0), 1)
    if R.PAIRS > 0:
        pair, near_place, far_place = places_of_pairs(R)
        is_pair = is_head & (pair < R.PAIRS)
        near = tl.load(rows + near_place, mask=is_pair, other=0.0).to(tl.float32)
        far = tl.load(rows + far_place, mask=is_pair, other=0.0).to(tl.float32)
        if R.NORM_DIM > 0:
            squares += tl.sum(tl.where(near_place < R.NORM_DIM, near * near, 0.0), 1)
            squares += tl.sum(tl.where(far_place < R.NORM_DIM, far * far, 0.0), 1)
    if R.NORM_DIM > 0:
        norm = tl.rsqrt(squares * (1.0 / R.NORM_DIM) + R.EPS)[:, None]
    if R.REST > 0:
        if R.NORM_DIM > 0:
            scaled = rest * norm * _weights(weight, place, R)
            rest = tl.where(place < R.NORM_DIM, scaled, rest)
        rest, rest_strange = _rounded(rest, is_rest, dtype, S.CHECKED)
        strange |= rest_strange
        if S.SCALES == TOKEN_SCALES:
            scale_value = tl.maximum(scale_value, scale_of_rows(rest.to(tl.float32), ENCODING))
    if R.PAIRS > 0:
        if R.NORM_DIM > 0:
            scaled = near * norm * _weights(weight, near_place, R)
            near = tl.where(near_place < R.NORM_DIM, scaled, near)
            scaled = far * norm * _weights(weight, far_place, R)
            far = tl.where(far_place < R.NORM_DIM, scaled, far)
        near, far = turned(near, far, angles.cos, angles.sin)
        near, near_strange = _rounded(near, is_pair, dtype, S.CHECKED)
        far, far_strange = _rounded(far, is_pair, dtype, S.CHECKED)
        strange |= near_strange | far_strange
        if S.SCALES == TOKEN_SCALES:
            scale_value = tl.maximum(scale_value, scale_of_rows(near.to(tl.float32), ENCODING))
            scale_value = tl.maximum(scale_value, scale_of_rows(far.to(tl.float32), ENCODING))
    if is_record(S.SCALES):
        # One head's row: elements that do not turn have codes, and the others are stored as they are.
        store_groups(rest, to.at, to.scale, R.REST, ENCODING, S.SCALES)
        if R.PAIRS > 0:
            tl.store(to.apart + (near_place - R.REST), as_bfloat16(near), mask=is_pair)
            tl.store(to.apart + (far_place - R.REST), as_bfloat16(far), mask=is_pair)
    else:
        reciprocal = 1.0
        if S.SCALES != NO_SCALES:
            # A row's parts share the largest of their scales, which is that of the row's largest element.
            reciprocal = tl.div_rn(1.0, _scale_values(to, head, scale_value[:, None], is_head, S.SCALES))
        if R.REST > 0:
            _put(rest, to, place, is_rest, reciprocal, S)
        if R.PAIRS > 0:
            _put(near, to, near_place, is_pair, reciprocal, S)
            _put(far, to, far_place, is_pair, reciprocal, S)
    return strange


@triton.jit
def _scale_values(to, head, own, is_head, SCALES: tl.constexpr):
    """The scale of each head's row, [HEADS_BLOCK, 1] or of the layer; own: of tokens, which are written."""
    if SCALES == TOKEN_SCALES:
        tl.store(to.scale + to.first_scale + head.to(tl.int64) * to.scale_head, own, mask=is_head)
        scale_value = own
    elif SCALES == HEAD_SCALES:
        scale_value = tl.load(to.scale + head, mask=is_head, other=1.0)
    else:
        scale_value = tl.load(to.scale)
    return scale_value


@triton.jit
def _rope_store_kernel(
    q,
    k,
    v,
    q_out,
    cos_sin,
    q_weight,
    k_weight,
    v_weight,
    positions,
    slot_of_token,
    counts,
    k_pages,
    v_pages,
    k_scale,
    v_scale,
    k_apart,
    num_positions,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    out_token,
    out_head,
    kp_page,
    kp_group,
    kp_head,
    kp_vector,
    vp_page,
    vp_group,
    vp_head,
    vp_vector,
    G: tl.constexpr,
):
    Q: tl.constexpr = G.q
    K: tl.constexpr = G.k
    V: tl.constexpr = G.v
    # The rows of q that turn have the same pairs as those of K.
    R: tl.constexpr = K.row
    wait_for_launch(G.EARLY)
    token = tl.program_id(0)
    t = token.to(tl.int64)
    angles = None
    if R.PAIRS > 0:
        cos, sin = angles_at(cos_sin, tl.load(positions + token), num_positions, R)
        angles = Angles(cos, sin)
    if tl.program_id(1) < G.Q_BLOCKS:
        # head: [HEADS_BLOCK, 1]; 64-bit before multiplying
        head = tl.program_id(1) * Q.HEADS_BLOCK + tl.arange(0, Q.HEADS_BLOCK)[:, None]
        rows = q + t * q_token + head.to(tl.int64) * q_head
        to = q_out + t * out_token + head.to(tl.int64) * out_head
        _carry(rows, RowTarget(to, 0, None, 0, 0, None), head, q_weight, angles, Q)
    elif G.STORES:
        slot = tl.load(slot_of_token + token).to(tl.int64)
        if (token < tl.load(counts + 1)) & (slot >= G.FIRST_SLOT):
            page = slot // G.PAGE_SIZE
            offset = slot % G.PAGE_SIZE
            head = (tl.program_id(1) - G.Q_BLOCKS) * K.HEADS_BLOCK + tl.arange(0, K.HEADS_BLOCK)[:, None]
            head64 = head.to(tl.int64)
            rows = k + t * k_token + head64 * k_head
            at = page * kp_page + token_cell(offset, kp_group, K.TOKENS)
            to = k_pages + at + head64 * kp_head
            scale = k_scale
            apart = k_apart
            if is_record(K.SCALES):
                scale = scales_of(k_scale, at, offset, G.NEARER)
                apart = k_apart + at // 2
            strange = _carry(
                rows,
                RowTarget(to, kp_vector, scale, page * (K.HEADS * G.PAGE_SIZE) + offset, G.PAGE_SIZE, apart),
                head,
                k_weight,
                angles,
                K,
            )
            if not G.LATENT:
                rows = v + t * v_token + head64 * v_head
                to = v_pages + page * vp_page + token_cell(offset, vp_group, V.TOKENS) + head64 * vp_head
                strange |= _carry(
                    rows,
                    RowTarget(to, vp_vector, v_scale, page * (V.HEADS * G.PAGE_SIZE) + offset, G.PAGE_SIZE, None),
                    head,
                    v_weight,
                    angles,
                    V,
                )
            if tl.max(strange, 0) > 0:
                tl.atomic_or(counts + _ERROR_WORD, _NOT_FINITE, sem="relaxed")


@only_launches
def launch_rope_store(
    given: Projected, tokens: TokenPlaces, work: QkvWork, pages: LayerPages, *, null_page: bool = True
) -> None:
    """Writes q_out, and K and V to their slots; an infinity or NaN is stored as 0.

    Padded tokens of q_out are computed like others. At a position that the table does not have, q_out is NaN, and K is
    stored as 0 with the error bit.
    pages:     linear, with any strides but the last, or vectorised; written in place. The elements of records that have
               no codes turn, and no others
    null_page: whether page 0 belongs to no sequence
    """
    form = pages.format
    turned_elements = 0 if work.rope is None else work.rope.dim
    assert pages.record is None or turned_elements == form.head_dim - form.coded, "a record turns what has no codes"
    k_row = RowGeometry.of(form.head_dim, work.rope, work.k_norm)
    v_row = RowGeometry.of(form.v_head_dim, None, work.v_norm)
    block = _heads_block(form.num_kv_heads, max(k_row.columns, v_row.columns))
    geometry = _geometry(given.q, work)._replace(
        k=_side_of_pages(k_row, block, pages.keys, form),
        v=_side_of_pages(v_row, block, pages.values, form),
        STORES=True,
        LATENT=form.kind is PoolKind.LATENT,
        PAGE_SIZE=form.page_size,
        NEARER=form.scales_nearer,
        FIRST_SLOT=form.page_size if null_page else 0,
    )
    page_strides = *pages.keys.cells.stride()[:4], *pages.values.cells.stride()[:4]
    scales, apart = (pages.k_scale, None) if pages.record is None else pages.record[1:]
    memory = pages.raw_k, pages.raw_v, scales, pages.v_scale, apart
    _launch(given, tokens, work, memory, page_strides, geometry)


def launch_rope_queries(q: Tensor, q_out: Tensor, positions: Tensor, work: QkvWork) -> None:
    """Writes q_out alone, for a layer that reads the pages that another one stores. See launch_rope_store."""
    geometry = _geometry(q, work)
    given, tokens = Projected(q, q, q, q_out), TokenPlaces(positions, positions, positions)
    _launch(given, tokens, work, (q, q, None, None, None), (0,) * 8, geometry)


def _geometry(q: Tensor, work: QkvWork) -> RopeStoreGeometry:
    """The geometry of queries alone."""
    row = RowGeometry.of(q.shape[2], work.rope, work.q_norm)
    block = _heads_block(q.shape[1], row.columns)
    side = SideGeometry(row, q.shape[1], block, row.DIM, 1, False, Encoding.of(q.dtype).number, Scales.NONE.number)
    return RopeStoreGeometry(side, side, side, side.blocks, False, False, 0, 0, 0, starts_early(q.device))


def _side_of_pages(row: RowGeometry, heads_block: int, rows: PageRows, form: PageFormat) -> SideGeometry:
    """The geometry of K or V on its way into pages."""
    cells = rows.vector_elements, rows.group_tokens
    return SideGeometry(row, form.num_kv_heads, heads_block, *cells, True, form.encoding.number, form.scales.number)


def _heads_block(heads: int, columns: int) -> int:
    return max(1, min(next_power_of_2(heads), _ELEMENTS // next_power_of_2(columns)))


def _launch(
    given: Projected,
    tokens: TokenPlaces,
    work: QkvWork,
    pages: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    page_strides: tuple[int, ...],
    geometry: RopeStoreGeometry,
) -> None:
    weights = (None if norm is None else norm.weight for norm in (work.q_norm, work.k_norm, work.v_norm))
    launch(
        _rope_store_kernel,
        (given.q.shape[0], geometry.Q_BLOCKS + geometry.k.blocks * geometry.STORES),
        given.q,
        given.k,
        given.v,
        given.q_out,
        None if work.rope is None else work.rope.cos_sin,
        *weights,
        *tokens,
        *pages,
        0 if work.rope is None else work.rope.num_positions,
        *(stride for tensor in given for stride in tensor.stride()[:2]),
        *page_strides,
        G=geometry,
        num_warps=geometry.q.num_warps,
        **early_options(geometry.EARLY),
    )
