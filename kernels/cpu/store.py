"""The store for CPUs: norms and rope of new rows, and their writes to the pages.

A CPU may look at values. So new rows are written by one copy where all are finite and have a slot, and the twins in
kernels/refs do the rest. A recorder notes a call as one launch.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import PoolKind
from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopePairs, RopeTable, RowNorm, TokenPlaces
from rocm_attn.kernels.launch import as_launch
from rocm_attn.kernels.refs import cache, rope


def _store_kv(
    k: Tensor, v: Tensor, slot_of_token: Tensor, counts: Tensor, pages: LayerPages, *, null_page: bool = True
) -> None:
    """Does the same as refs.cache.store_kv."""
    if torch.is_grad_enabled():
        # If a K with gradients joined the pages to its graph, they would keep the graph alive for good.
        with torch.no_grad():
            _store_kv(k, v, slot_of_token, counts, pages, null_page=null_page)
        return
    form, num_tokens = pages.format, int(counts[1])
    is_plain = form.kind is PoolKind.SPLIT and pages.raw_k.dtype == k.dtype == v.dtype == pages.raw_v.dtype
    if is_plain and pages.raw_k.is_contiguous() and pages.raw_v.is_contiguous() and 0 < num_tokens <= k.shape[0]:
        if num_tokens < k.shape[0]:
            k, v, slot_of_token = k[:num_tokens], v[:num_tokens], slot_of_token[:num_tokens]
        if int(slot_of_token.min()) >= (form.page_size if null_page else 0) and _are_finite(k, v):
            slot = slot_of_token.long()
            pages.raw_k.flatten(0, 1).index_copy_(0, slot, k)
            pages.raw_v.flatten(0, 1).index_copy_(0, slot, v)
            return
    cache.store_kv(k, v, slot_of_token, counts, pages, null_page=null_page)


store_kv = as_launch(_store_kv)


def _are_finite(k: Tensor, v: Tensor) -> bool:
    """True only if every element is finite: a sum with one that is not is none. A sum may overflow without one."""
    return math.isfinite((k.sum(dtype=torch.float32) + v.sum(dtype=torch.float32)).item())


def _rope_store(
    given: Projected, tokens: TokenPlaces, work: QkvWork, pages: LayerPages, *, null_page: bool = True
) -> None:
    """Does the same as refs.rope.rope_store."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            _rope_store(given, tokens, work, pages, null_page=null_page)
        return
    if pages.format.kind is PoolKind.LATENT or not _is_turned_fast(work.rope):
        rope.rope_store(given, tokens, work, pages, null_page=null_page)
        return
    q, k, v, q_out = given
    if work.q_norm is None and work.k_norm is None and _are_adjacent(q, k):
        # One pass over the rows of both.
        both = q.as_strided((q.shape[0], q.shape[1] + k.shape[1], q.shape[2]), q.stride())
        turned = _carried(both, tokens.positions, work.rope, None)
        q_out.copy_(turned[:, : q.shape[1]])
        k = turned[:, q.shape[1] :]
    else:
        k = _carried(k, tokens.positions, work.rope, work.k_norm)
        q_out.copy_(_carried(q, tokens.positions, work.rope, work.q_norm))
    v = _carried(v, tokens.positions, None, work.v_norm)
    _store_kv(k, v, tokens.slot_of_token, tokens.counts, pages, null_page=null_page)


rope_store = as_launch(_rope_store)


@as_launch
def rope_queries(q: Tensor, q_out: Tensor, positions: Tensor, work: QkvWork) -> None:
    """Does the same as refs.rope.rope_queries."""
    if _is_turned_fast(work.rope):
        q_out.copy_(_carried(q, positions, work.rope, work.q_norm))
    else:
        rope.rope_queries(q, q_out, positions, work)


def _is_turned_fast(table: RopeTable | None) -> bool:
    return table is None or table.pairs is RopePairs.HALVES


def _are_adjacent(q: Tensor, k: Tensor) -> bool:
    """True if the rows of k follow those of q in one buffer."""
    end = q.data_ptr() + q.shape[1] * q.stride(1) * q.itemsize
    return k.data_ptr() == end and q.stride() == k.stride() and q.shape[2] == k.shape[2]


def _carried(x: Tensor, positions: Tensor, table: RopeTable | None, norm: RowNorm | None) -> Tensor:
    """x [T, heads, dim], normalised and turned; x itself if there is nothing to do."""
    if table is None and norm is None:
        return x
    rows = x.float()
    if norm is not None:
        weight = norm.weight.float()
        rows = F.rms_norm(rows, weight.shape, weight + norm.offset if norm.offset else weight, norm.eps)
    if table is not None:
        rows = _turned(rows, positions, table)
    return rows.to(x.dtype)


def _turned(x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
    """x [T, heads, dim], float32, with halves of the rows at one of its ends turned."""
    half = table.dim // 2
    cos, sin = _halves(_lines(positions, table).unsqueeze(1), half)
    turned = torch.empty(x.shape, dtype=x.dtype)
    pairs, turned_pairs = x, turned
    if table.dim < x.shape[2]:
        turned.copy_(x)
        begin = x.shape[2] - table.dim if table.at_end else 0
        pairs, turned_pairs = x.narrow(2, begin, table.dim), turned.narrow(2, begin, table.dim)
    (near, far), (turned_near, turned_far) = _halves(pairs, half), _halves(turned_pairs, half)
    torch.mul(near, cos, out=turned_near).addcmul_(far, sin, value=-1)
    torch.mul(far, cos, out=turned_far).addcmul_(near, sin)
    return turned


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """The halves of rows; chunk() takes longer."""
    return x.narrow(2, 0, half), x.narrow(2, half, half)


def _lines(positions: Tensor, table: RopeTable) -> Tensor:
    """Float32 [T, dim]: the table's lines; NaN for a position without one."""
    try:
        return table.cos_sin.index_select(0, positions).float()
    except IndexError:
        in_table = (positions >= 0) & (positions < table.num_positions)
        lines = table.cos_sin.index_select(0, torch.where(in_table, positions, 0)).float()
        return torch.where(in_table[:, None], lines, float("nan"))
