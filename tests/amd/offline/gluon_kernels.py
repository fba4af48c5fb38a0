"""A study, which serves nothing: decode for CDNA in Gluon, whose keys and values go straight into matrix operands.

    out = softmax(scale q . K^T) V        of one token a sequence; a program is a wave with one KV head of one sequence

What Triton moves through LDS stays in the registers that it was loaded into:

    S^T = K q^T     a lane loads eight neighbouring elements of a key, as the product wants them
    O^T = V^T P^T   a lane loads eight neighbouring elements of each of 4 (gfx942) or 8 keys (gfx950). They are its own
                    operand of eight products, whose rows are every eighth element; and the weights that S^T left in it
                    are of the same keys

BLOCKS blocks of keys are in flight, each in registers of its own. The loop is written out BLOCKS times, so that nothing
is moved from one to another, which would wait for its load. Blocks are of pairs of elements: single ones would be taken
apart where they are loaded. Page numbers are scalar loads, two rounds ahead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

PAGE = 16
HEAD_DIMS = (128, 256)
# Query heads of a KV head, padded.
ROWS = 16
_LOG2_E = 1.4426950408889634
_PAGE, _ROWS = gl.constexpr(PAGE), gl.constexpr(ROWS)


class StudyGeometry(NamedTuple):
    """What the kernel is compiled for.

    CDNA:   3 or 4
    DIM:    elements of a row of K and of V
    RATIO:  query heads of a KV head, ROWS at most
    PAGES:  of a block of keys: a product with P^T takes 16 keys on CDNA 3 and 32 on CDNA 4
    BLOCKS: that are in flight
    """

    CDNA: int
    DIM: int
    RATIO: int
    PAGES: int
    BLOCKS: int

    @classmethod
    def of(cls, cdna: int, dim: int, ratio: int, blocks: int) -> StudyGeometry:
        """With pages as the CDNA has them."""
        return cls(cdna, dim, ratio, 1 if cdna == 3 else 2, blocks)


class _Page(NamedTuple):
    """K and V of a page, int32 [PAGE, DIM / 2]: pairs of elements."""

    k: gl.tensor
    v: gl.tensor


class _Softmax(NamedTuple):
    """O^T [DIM, ROWS], whose rows are 8 i + j at DIM / 8 j + i; maximum and total of each column."""

    acc: gl.tensor
    maximum: gl.tensor
    total: gl.tensor


@constexpr_function
def _product(G: StudyGeometry) -> gl.constexpr:
    """Of the result of a product: a lane has a column, and four rows in turn."""
    depth = 16 if G.CDNA == 3 else 32
    return gl.amd.AMDMFMALayout(version=G.CDNA, instr_shape=[16, 16, depth], transposed=False, warps_per_cta=[1, 1])


@constexpr_function
def _key_pairs(G: StudyGeometry) -> gl.constexpr:
    """Of K as it is loaded: 16 lanes have a key each; four times four pairs side by side make 32 elements of it."""
    more = [[0, 16 << i] for i in range((G.DIM // 32).bit_length() - 1)]
    lanes = [[1, 0], [2, 0], [4, 0], [8, 0], [0, 4], [0, 8]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *more], lanes, [], [], [16, G.DIM // 2])


@constexpr_function
def _value_pairs(G: StudyGeometry) -> gl.constexpr:
    """Of V as it is loaded: 16 lanes have 128 elements of a key, and each lane those of four keys in turn."""
    more = [[0, 64 << i] for i in range((G.DIM // 128).bit_length() - 1)]
    lanes = [[0, 4], [0, 8], [0, 16], [0, 32], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [1, 0], [2, 0], *more], lanes, [], [], [16, G.DIM // 2])


@constexpr_function
def _query(G: StudyGeometry) -> gl.constexpr:
    """Of q as it is loaded, [ROWS, DIM], which turned over is an operand."""
    more = [[0, 32 << i] for i in range((G.DIM // 32).bit_length() - 1)]
    lanes = [[1, 0], [2, 0], [4, 0], [8, 0], [0, 8], [0, 16]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], *more], lanes, [], [], [16, G.DIM])


@gluon.jit
def _elements(pairs, G: gl.constexpr):
    """bfloat16 [16, DIM]"""
    low = pairs.to(gl.uint16).to(gl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    return gl.reshape(gl.join(low, high), [16, G.DIM])


@gluon.jit
def _load(pages, number, stride, offsets):
    """Pairs of a page. stride: between pages, in elements"""
    at = (pages + number.to(gl.int64) * stride).to(gl.pointer_type(gl.int32))
    return gl.amd.cdna3.buffer_load(at, offsets)


@gluon.jit
def _numbers(line, block, last, G: gl.constexpr):
    """Page numbers of a block. last: the last page that may be read, which stands for later ones"""
    found = ()
    for i in gl.static_range(G.PAGES):
        found += (gl.load(line + gl.minimum(block * G.PAGES + i, last)),)  # type: ignore[assignment]
    return found


@gluon.jit
def _load_block(k_pages, v_pages, numbers, stride, k_offsets, v_offsets, G: gl.constexpr):
    """A tuple of _Page."""
    block = ()
    for i in gl.static_range(G.PAGES):
        k = _load(k_pages, numbers[i], stride, k_offsets)
        block += (_Page(k, _load(v_pages, numbers[i], stride, v_offsets)),)  # type: ignore[assignment]
    return block


@gluon.jit
def _scores(query, page, first, kv_len, G: gl.constexpr, MASKED: gl.constexpr):
    """K q^T of a page, [PAGE, ROWS]. first: its first key"""
    P: gl.constexpr = _product(G)
    k = gl.convert_layout(_elements(page.k, G), gl.DotOperandLayout(0, P, 8), assert_trivial=True)
    scores = gl.amd.cdna3.mfma(k, query, gl.full([_PAGE, _ROWS], 0.0, gl.float32, layout=P))
    if MASKED:
        key = first + gl.arange(0, _PAGE, layout=gl.SliceLayout(1, P))
        scores = gl.where((key < kv_len)[:, None], scores, float("-inf"))
    return scores


@gluon.jit
def _values(page, first, kv_len, G: gl.constexpr, MASKED: gl.constexpr):
    """V of a page; 0 of keys that are not there, whatever lies in their place."""
    v = page.v
    if MASKED:
        key = first + gl.arange(0, _PAGE, layout=gl.SliceLayout(1, _value_pairs(G)))
        v = gl.where((key < kv_len)[:, None], v, 0)
    return _elements(v, G)


@gluon.jit
def _rounded(weights, G: gl.constexpr):
    """In bfloat16: the nearest, the even one of two. By hand on CDNA 3, see softmax.py."""
    if G.CDNA == 3:
        bits = weights.to(gl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = bits.to(gl.uint16).to(gl.bfloat16, bitcast=True)
    else:
        result = weights.to(gl.bfloat16)
    return result


@gluon.jit
def _attend(state, query, block, first, kv_len, qk_scale, G: gl.constexpr, MASKED: gl.constexpr):
    """A block added to a _Softmax."""
    P: gl.constexpr = _product(G)
    DEPTH: gl.constexpr = 4 if G.CDNA == 3 else 8
    EIGHTHS: gl.constexpr = G.DIM // 8
    scores = _scores(query, block[0], first, kv_len, G, MASKED)
    v = _values(block[0], first, kv_len, G, MASKED)
    if G.PAGES == 2:
        more = _scores(query, block[1], first + _PAGE, kv_len, G, MASKED)
        maximum = gl.maximum(state.maximum, gl.max(gl.maximum(scores, more), 0) * qk_scale)
        others = gl.exp2(more * qk_scale - maximum[None, :])
        weights = gl.exp2(scores * qk_scale - maximum[None, :])
        total = gl.sum(weights + others, 0)
        # A lane's keys are four of one page and four of the other.
        weights = gl.reshape(gl.join(weights, others), [4, 4, _ROWS, 2])
        weights = gl.reshape(gl.permute(weights, (0, 3, 1, 2)), [2 * _PAGE, _ROWS])
        v = gl.join(v, _values(block[1], first + _PAGE, kv_len, G, MASKED))
        v = gl.permute(gl.reshape(v, [4, 4, EIGHTHS, 8, 2]), (3, 2, 0, 4, 1))
    else:
        maximum = gl.maximum(state.maximum, gl.max(scores, 0) * qk_scale)
        weights = gl.exp2(scores * qk_scale - maximum[None, :])
        total = gl.sum(weights, 0)
        v = gl.permute(gl.reshape(v, [_PAGE, EIGHTHS, 8]), (2, 1, 0))
    v = gl.reshape(v, [G.DIM, G.PAGES * _PAGE])
    decay = gl.exp2(state.maximum - maximum)
    weights = gl.convert_layout(_rounded(weights, G), gl.DotOperandLayout(1, P, DEPTH), assert_trivial=True)
    v = gl.convert_layout(v, gl.DotOperandLayout(0, P, DEPTH), assert_trivial=True)
    acc = gl.amd.cdna3.mfma(v, weights, state.acc * decay[None, :])
    return _Softmax(acc, maximum, state.total * decay + total)


@gluon.jit
def _store(state, out, G: gl.constexpr):
    """The rows of a KV head's query heads. out: of the first one"""
    result = gl.reshape(state.acc / state.total[None, :], [8, G.DIM // 8, _ROWS])
    result = gl.reshape(gl.permute(result, (2, 1, 0)), [_ROWS, G.DIM]).to(gl.bfloat16)
    L: gl.constexpr = result.type.layout
    row = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, L))[:, None]
    offsets = row * G.DIM + gl.arange(0, G.DIM, layout=gl.SliceLayout(0, L))[None, :]
    gl.amd.cdna3.buffer_store(result, out, offsets, mask=row < G.RATIO)


@gluon.jit
def _gluon_decode_kernel(
    q, k_pages, v_pages, table, kv_lens, out, qk_scale, kp_page, kp_token, kp_head, table_row, kv_heads, G: gl.constexpr
):
    P: gl.constexpr = _product(G)
    L: gl.constexpr = gl.SliceLayout(0, P)
    BLOCKS: gl.constexpr = G.BLOCKS
    KEYS: gl.constexpr = G.PAGES * _PAGE
    seq = gl.program_id(0) // kv_heads
    kv_head = gl.program_id(0) % kv_heads
    first_q = gl.program_id(0).to(gl.int64) * (G.RATIO * G.DIM)
    kv_len = gl.load(kv_lens + seq)
    line = table + seq * table_row
    last = (kv_len - 1) // _PAGE
    k_pages += kv_head * kp_head
    v_pages += kv_head * kp_head

    gl.assume(kp_token >= 0)
    gl.assume(kp_token < 32768)
    kp: gl.constexpr = _key_pairs(G)
    vp: gl.constexpr = _value_pairs(G)
    ql: gl.constexpr = _query(G)
    k_row = gl.arange(0, _PAGE, layout=gl.SliceLayout(1, kp))[:, None] * (kp_token // 2)
    k_offsets = k_row + gl.arange(0, G.DIM // 2, layout=gl.SliceLayout(0, kp))[None, :]
    v_row = gl.arange(0, _PAGE, layout=gl.SliceLayout(1, vp))[:, None] * (kp_token // 2)
    v_offsets = v_row + gl.arange(0, G.DIM // 2, layout=gl.SliceLayout(0, vp))[None, :]
    row = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, ql))[:, None]
    q_offsets = row * G.DIM + gl.arange(0, G.DIM, layout=gl.SliceLayout(0, ql))[None, :]
    query = gl.amd.cdna3.buffer_load(q + first_q, q_offsets, mask=row < G.RATIO, other=0.0)
    query = gl.convert_layout(gl.permute(query, (1, 0)), gl.DotOperandLayout(1, P, 8), assert_trivial=True)

    blocks = ()
    numbers = ()
    for i in gl.static_range(BLOCKS):
        block = _load_block(k_pages, v_pages, _numbers(line, i, last, G), kp_page, k_offsets, v_offsets, G)
        blocks += (block,)  # type: ignore[assignment]
    for i in gl.static_range(BLOCKS):
        numbers += (_numbers(line, BLOCKS + i, last, G),)  # type: ignore[assignment]
    state = _Softmax(
        gl.full([G.DIM, _ROWS], 0.0, gl.float32, layout=P),
        gl.full([_ROWS], float("-inf"), gl.float32, layout=L),
        gl.full([_ROWS], 0.0, gl.float32, layout=L),
    )
    whole = kv_len // KEYS // BLOCKS * BLOCKS
    for first in range(0, whole, BLOCKS):
        next_blocks = ()
        next_numbers = ()
        for i in gl.static_range(BLOCKS):
            state = _attend(state, query, blocks[i], (first + i) * KEYS, kv_len, qk_scale, G, False)
            next_numbers += (_numbers(line, first + i + 2 * BLOCKS, last, G),)  # type: ignore[assignment]
            next_blocks += (_load_block(k_pages, v_pages, numbers[i], kp_page, k_offsets, v_offsets, G),)  # type: ignore[assignment]
        blocks = next_blocks
        numbers = next_numbers
    for i in gl.static_range(BLOCKS):
        if (whole + i) * KEYS < kv_len:
            state = _attend(state, query, blocks[i], (whole + i) * KEYS, kv_len, qk_scale, G, True)
    _store(state, out + first_q, G)


def launch_gluon_decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, kv_lens: Tensor, out: Tensor, *, cdna: int, blocks: int
) -> None:
    """Decode of sequences with one key or more.

    q, out:           bfloat16 [sequences, query heads, head dim]
    k_pages, v_pages: bfloat16 [pages, PAGE, KV heads, head dim], of equal strides
    table:            int32 [sequences, pages of a sequence]
    kv_lens:          int32 [sequences]
    cdna, blocks:     StudyGeometry's
    """
    num_seqs, q_heads, dim = q.shape
    kv_heads = k_pages.shape[2]
    ratio = q_heads // kv_heads
    assert dim in HEAD_DIMS
    assert ratio <= ROWS
    assert k_pages.shape[1] == PAGE
    assert k_pages.stride() == v_pages.stride()
    assert q.is_contiguous()
    assert out.is_contiguous()
    assert q.dtype == k_pages.dtype == torch.bfloat16
    _gluon_decode_kernel[(num_seqs * kv_heads,)](
        q,
        k_pages,
        v_pages,
        table,
        kv_lens,
        out,
        _LOG2_E / dim**0.5,
        *k_pages.stride()[:3],
        table.stride(0),
        kv_heads,
        G=StudyGeometry.of(cdna, dim, ratio, blocks),
        num_warps=1,
    )
