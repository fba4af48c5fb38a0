"""Torch twins of kernels/cache/rope_store.py and kernels/attention/finish.py: same signatures, same results."""

import torch
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import PoolKind
from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopePairs, RopeTable, RowNorm, TokenPlaces
from rocm_attn.kernels.refs.cache import store_kv


def rope_store(
    given: Projected, tokens: TokenPlaces, work: QkvWork, pages: LayerPages, *, null_page: bool = True
) -> None:
    """Twin of launch_rope_store."""
    rope_queries(given.q, given.q_out, tokens.positions, work)
    k, v = stored_rows(given, tokens, work, pages)
    store_kv(k, v, tokens.slot_of_token, tokens.counts, pages, null_page=null_page)


def stored_rows(given: Projected, tokens: TokenPlaces, work: QkvWork, pages: LayerPages) -> tuple[Tensor, Tensor]:
    """K and V as the store receives them, [T, kv_heads, head_dim | v_head_dim]."""
    k = _carried(given.k, tokens.positions, work.rope, work.k_norm)
    if pages.format.kind is PoolKind.LATENT:
        return k, k[..., : given.v.shape[2]]
    return k, _carried(given.v, tokens.positions, None, work.v_norm)


def rope_queries(q: Tensor, q_out: Tensor, positions: Tensor, work: QkvWork) -> None:
    """Twin of launch_rope_queries."""
    q_out.copy_(_carried(q, positions, work.rope, work.q_norm))


def finish(out: Tensor, gate: Tensor | None, rope: RopeTable | None, positions: Tensor, counts: Tensor) -> None:
    """Twin of launch_finish."""
    x = out.float() if rope is None else _turned(out.float(), positions, rope, back=True)
    if gate is not None:
        x = x * torch.sigmoid(gate.float() if gate.dim() == 3 else gate.float()[..., None])
    is_real = torch.arange(len(out), device=out.device) < counts[1]
    out.copy_(torch.where(is_real[:, None, None], x.to(out.dtype), out))


def _carried(x: Tensor, positions: Tensor, rope: RopeTable | None, norm: RowNorm | None) -> Tensor:
    """x [T, heads, dim], normalised and turned."""
    rows = x.float()
    if norm is not None:
        first, rest = rows.split((norm.dim, rows.shape[2] - norm.dim), 2)
        scale = (first.square().mean(2, keepdim=True) + norm.eps).rsqrt()
        rows = torch.cat((first * scale * (norm.weight.float() + norm.offset), rest), 2)
    if rope is not None:
        rows = _turned(rows, positions, rope, back=False)
    return rows.to(x.dtype)


def _turned(x: Tensor, positions: Tensor, rope: RopeTable, *, back: bool) -> Tensor:
    """x [T, heads, dim], float32, with the pairs at one of its ends turned, or turned back."""
    in_table = (positions >= 0) & (positions < rope.num_positions)
    lines = rope.cos_sin.index_select(0, torch.where(in_table, positions, 0)).float()
    cos, sin = torch.where(in_table[:, None], lines, float("nan"))[:, None].chunk(2, 2)
    begin = x.shape[2] - rope.dim if rope.at_end else 0
    end = begin + rope.dim
    pairs = x[..., begin:end]
    if rope.pairs is RopePairs.HALVES:
        near, far = pairs.chunk(2, 2)
    else:
        near, far = pairs[..., 0::2], pairs[..., 1::2]
    sin = -sin if back else sin
    both = near * cos - far * sin, far * cos + near * sin
    turned = torch.cat(both, 2) if rope.pairs is RopePairs.HALVES else torch.stack(both, 3).flatten(2)
    return torch.cat((x[..., :begin], turned, x[..., end:]), 2)
