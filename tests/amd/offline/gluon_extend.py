"""A study of extend for CDNA in Gluon: one wave per program; K and V go straight into the operands of products.

    out[token] = softmax(q[token] . K^T) V        of one sequence: every token sees all keys

It is decode for CDNA with more rows of q: 32 or 64, new tokens times the query heads of a KV head. extend_study.py
compiles it and compares its hot loop with the rows that serve; it serves nothing. Keys are whole blocks of 32, and the
diagonal of a prompt is left out: neither is in a hot loop.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.cdna.key_blocks import _elements as elements
from rocm_attn.kernels.cdna.key_blocks import _rounded as rounded
from rocm_attn.kernels.cdna.key_blocks import key_pairs, product_layout, value_pairs
from rocm_attn.kernels.launch import launch

CHUNK = gl.constexpr(16)
# A maximum is unchanged until scores are 2^8 times those that it was rescaled to.
LEAST_GROWTH = gl.constexpr(8.0)
# Below every score, and finite: the difference of two is a number.
NOTHING_SEEN = gl.constexpr(-1e30)


class StudyGeometry(NamedTuple):
    """The constants that the kernel is compiled for.

    CDNA:      3 or 4
    COLUMNS:   elements of a head
    ROWS:      rows of q, a multiple of 16
    GQA_RATIO: query heads that share a KV head
    PAGE_SIZE: tokens of a page, a multiple of 16
    LAZY:      true if results are rescaled only where a maximum has grown
    """

    CDNA: int
    COLUMNS: int
    ROWS: int
    GQA_RATIO: int
    PAGE_SIZE: int
    LAZY: bool


@constexpr_function
def _query_layout(G: StudyGeometry) -> gl.constexpr:
    """Layout of q as it is loaded, [ROWS, COLUMNS]; its transpose is an operand's layout."""
    columns = [[0, 32 << i] for i in range((G.COLUMNS // 32).bit_length() - 1)]
    rows = [[16 << i, 0] for i in range((G.ROWS // 16).bit_length() - 1)]
    lanes = [[1, 0], [2, 0], [4, 0], [8, 0], [0, 8], [0, 16]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], *columns, *rows], lanes, [], [], [G.ROWS, G.COLUMNS])


@gluon.jit
def _offsets(token, L: gl.constexpr, G: gl.constexpr):
    """Offsets of pairs of elements in a chunk."""
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, L))[:, None] * (token // 2)
    return row + gl.arange(0, G.COLUMNS // 2, layout=gl.SliceLayout(0, L))[None, :]


@gluon.jit
def _load(at, page_stride, token_stride, offsets, chunk, line, G: gl.constexpr):
    """Loads pairs of a chunk."""
    A_PAGE: gl.constexpr = G.PAGE_SIZE // CHUNK
    page = gl.load(line + chunk // A_PAGE)
    at = at + page.to(gl.int64) * page_stride + chunk % A_PAGE * CHUNK * token_stride
    return gl.amd.cdna3.buffer_load(at.to(gl.pointer_type(gl.int32)), offsets)


@gluon.jit
def _scores(pairs, query, G: gl.constexpr):
    P: gl.constexpr = product_layout(G)
    k = gl.convert_layout(elements(pairs, query.dtype, G), gl.DotOperandLayout(0, P, 8), assert_trivial=True)
    return gl.amd.cdna3.mfma(k, query, gl.full([CHUNK, G.ROWS], 0.0, gl.float32, layout=P))


@gluon.jit
def _add(acc, first, second, v_first, v_second, DTYPE: gl.constexpr, G: gl.constexpr):
    """Adds the weighted values of two chunks: in one product on CDNA 4, whose products are twice as deep."""
    P: gl.constexpr = product_layout(G)
    EIGHTHS: gl.constexpr = G.COLUMNS // 8
    V: gl.constexpr = gl.DotOperandLayout(0, P, 4 if G.CDNA == 3 else 8)
    W: gl.constexpr = gl.DotOperandLayout(1, P, 4 if G.CDNA == 3 else 8)
    if G.CDNA == 4:
        w = gl.reshape(gl.join(first, second), [4, 4, G.ROWS, 2])
        w = gl.reshape(gl.permute(w, (0, 3, 1, 2)), [2 * CHUNK, G.ROWS])
        v = gl.join(elements(v_first, DTYPE, G), elements(v_second, DTYPE, G))
        v = gl.permute(gl.reshape(v, [4, 4, EIGHTHS, 8, 2]), (3, 2, 0, 4, 1))
        v = gl.convert_layout(gl.reshape(v, [G.COLUMNS, 2 * CHUNK]), V, assert_trivial=True)
        acc = gl.amd.cdna3.mfma(v, gl.convert_layout(rounded(w, DTYPE, G), W, assert_trivial=True), acc)
    else:
        for i in gl.static_range(2):
            pairs = v_first if i == 0 else v_second
            w = first if i == 0 else second
            v = gl.permute(gl.reshape(elements(pairs, DTYPE, G), [CHUNK, EIGHTHS, 8]), (2, 1, 0))
            v = gl.convert_layout(gl.reshape(v, [G.COLUMNS, CHUNK]), V, assert_trivial=True)
            acc = gl.amd.cdna3.mfma(v, gl.convert_layout(rounded(w, DTYPE, G), W, assert_trivial=True), acc)
    return acc


@gluon.jit
def _attend(state, query, block, qk_scale, G: gl.constexpr):
    """Adds a block of two chunks to accumulator, maximum and sum."""
    acc, maximum, total = state
    k_first, k_second, v_first, v_second = block
    first, second = _scores(k_first, query, G), _scores(k_second, query, G)
    top = gl.max(gl.maximum(first, second), 0) * qk_scale
    if G.LAZY:
        new = maximum
        if gl.max(top - maximum, 0) > LEAST_GROWTH:
            new = gl.maximum(maximum, top)
            decay = gl.exp2(maximum - new)
            acc = acc * decay[None, :]
            total = total * decay
    else:
        new = gl.maximum(maximum, top)
        decay = gl.exp2(maximum - new)
        acc = acc * decay[None, :]
        total = total * decay
    first = gl.exp2(first * qk_scale - new[None, :])
    second = gl.exp2(second * qk_scale - new[None, :])
    total += gl.sum(first + second, 0)
    return _add(acc, first, second, v_first, v_second, query.dtype, G), new, total


@gluon.jit(do_not_specialize=["kv_len"])
def _gluon_extend_kernel(
    q,
    k_pages,
    v_pages,
    line: tl.const,
    out,
    kv_len,
    qk_scale,
    q_token,
    q_head,
    kv_page,
    kv_token,
    kv_head,
    out_token,
    out_head,
    G: gl.constexpr,
):
    P: gl.constexpr = product_layout(G)
    Q: gl.constexpr = _query_layout(G)
    S: gl.constexpr = gl.SliceLayout(0, P)
    tile, head = gl.program_id(0), gl.program_id(1)
    row = gl.arange(0, G.ROWS, layout=gl.SliceLayout(1, Q))
    token, q_heads = tile * (G.ROWS // G.GQA_RATIO) + row // G.GQA_RATIO, head * G.GQA_RATIO + row % G.GQA_RATIO
    column = gl.arange(0, G.COLUMNS, layout=gl.SliceLayout(0, Q))
    query = gl.load(q + (token * q_token + q_heads * q_head)[:, None] + column[None, :])
    query = gl.convert_layout(gl.permute(query, (1, 0)), gl.DotOperandLayout(1, P, 8), assert_trivial=True)
    k_offsets, v_offsets = _offsets(kv_token, key_pairs(G), G), _offsets(kv_token, value_pairs(G), G)
    k_pages += head * kv_head
    v_pages += head * kv_head
    last = kv_len // CHUNK - 1
    state = (
        gl.full([G.COLUMNS, G.ROWS], 0.0, gl.float32, layout=P),
        gl.full([G.ROWS], NOTHING_SEEN, gl.float32, layout=S),
        gl.full([G.ROWS], 0.0, gl.float32, layout=S),
    )
    block = (
        _load(k_pages, kv_page, kv_token, k_offsets, 0, line, G),
        _load(k_pages, kv_page, kv_token, k_offsets, 1, line, G),
        _load(v_pages, kv_page, kv_token, v_offsets, 0, line, G),
        _load(v_pages, kv_page, kv_token, v_offsets, 1, line, G),
    )
    for chunk in range(0, kv_len // CHUNK, 2):
        # The last block is loaded once more, and ignored.
        one, other = gl.minimum(chunk + 2, last), gl.minimum(chunk + 3, last)
        state = _attend(state, query, block, qk_scale, G)
        block = (
            _load(k_pages, kv_page, kv_token, k_offsets, one, line, G),
            _load(k_pages, kv_page, kv_token, k_offsets, other, line, G),
            _load(v_pages, kv_page, kv_token, v_offsets, one, line, G),
            _load(v_pages, kv_page, kv_token, v_offsets, other, line, G),
        )
    acc, _, total = state
    result = gl.reshape(acc / total[None, :], [8, G.COLUMNS // 8, G.ROWS])
    result = gl.reshape(gl.permute(result, (2, 1, 0)), [G.ROWS, G.COLUMNS]).to(out.dtype.element_ty)
    L: gl.constexpr = result.type.layout
    row = gl.arange(0, G.ROWS, layout=gl.SliceLayout(1, L))
    token, q_heads = tile * (G.ROWS // G.GQA_RATIO) + row // G.GQA_RATIO, head * G.GQA_RATIO + row % G.GQA_RATIO
    column = gl.arange(0, G.COLUMNS, layout=gl.SliceLayout(0, L))
    gl.store(out + (token * out_token + q_heads * out_head)[:, None] + column[None, :], result)


def launch_gluon_extend(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, line: Tensor, out: Tensor, *, kv_len: int, geometry: StudyGeometry
) -> None:
    """Attention of whole query blocks over kv_len keys, a multiple of 32, of one sequence.

    q, out:           [T, q_heads, COLUMNS], contiguous; T * GQA_RATIO is a multiple of ROWS
    k_pages, v_pages: [pages, PAGE_SIZE, kv_heads, COLUMNS], contiguous
    line:             int32, the sequence's pages
    """
    num_tokens, num_q_heads, dim = q.shape
    assert kv_len % 32 == 0
    assert num_tokens * geometry.GQA_RATIO % geometry.ROWS == 0
    assert k_pages.stride() == v_pages.stride()
    launch(
        _gluon_extend_kernel,
        (num_tokens * geometry.GQA_RATIO // geometry.ROWS, num_q_heads // geometry.GQA_RATIO),
        q,
        k_pages,
        v_pages,
        line,
        out,
        kv_len,
        dim**-0.5 * 1.4426950408889634,
        *q.stride()[:2],
        *k_pages.stride()[:3],
        *out.stride()[:2],
        G=geometry,
        num_warps=1,
    )
