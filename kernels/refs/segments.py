"""Torch twins of the deterministic attention kernels: on a CPU, the same bits for a token in any batch and any chunk.

Tiles have TILE_LEN rows and segments segment_len keys in every step: every product has one shape, in which only the
number in the batch varies, and every sum is over one length. Rows without a token and keys that a row does not see add
exact zeros. Segments lie at absolute places and are merged from left to right, as in attention/segments.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.visible_keys import VisibleKeys
from rocm_attn.kernels.refs.attention import TokenBlocks, by_row, by_token, clear, tile_cut

TILE_LEN = 8
SEGMENT_LEN = 128
# Elements of gathered K, V and scores in flight.
_GROUP_ELEMENTS = 1 << 20


def segment_extend(
    args: AttendArgs, *, scores: Scores, segment_len: int = SEGMENT_LEN, mask: VisibleKeys | None = None
) -> None:
    """Attends for every new token of every sequence; tokens at or past q_indptr[-1] get 0 and LSE -inf.

    Twin of launch_segment_extend and, in steps of one new token each, of launch_segment_decode; schedule and workspace
    have no meaning here, segments have segment_len keys. Without a schedule there is no min_q_len. The work is
    proportional to max_kv_len.
    """
    queries = args.queries
    if queries.num_tokens == 0 or queries.num_seqs == 0:
        clear(args)
        return
    cut = tile_cut(queries, TILE_LEN)
    rows = TokenBlocks.of(args, cut, scores, mask)
    rows = replace(rows, q=rows.q.masked_fill(~cut.has_token[:, :, None, None], 0))
    cut.store(args, *_attend(args, rows, scores, segment_len))


@dataclass(frozen=True, slots=True)
class _Partial:
    """The softmax state of keys: acc [kv_heads, tiles, rows, v_head_dim], maximum, total [kv_heads, tiles, rows, 1]."""

    acc: Tensor
    maximum: Tensor
    total: Tensor

    def merged(self, right: _Partial) -> _Partial:
        """Merges the state of these keys with that of keys on their right."""
        maximum = torch.maximum(self.maximum, right.maximum)
        base = maximum.masked_fill(maximum == float("-inf"), 0)
        decay, weight = (self.maximum - base).exp(), (right.maximum - base).exp()
        return _Partial(self.acc * decay + right.acc * weight, maximum, self.total * decay + right.total * weight)


def _attend(args: AttendArgs, rows: TokenBlocks, scores: Scores, segment_len: int) -> tuple[Tensor, Tensor]:
    """Returns [tiles, TILE_LEN, q_heads, v_head_dim] and LSE [tiles, TILE_LEN, q_heads], a group of tiles at a time."""
    num_tiles, _, num_q_heads, head_dim = rows.q.shape
    num_kv_heads, v_head_dim = args.pages.format.num_kv_heads, args.pages.format.v_head_dim
    elements = segment_len * (num_kv_heads * (head_dim + v_head_dim) + TILE_LEN * num_q_heads)
    group = max(1, _GROUP_ELEMENTS // elements)
    parts = [
        _attend_group(args, rows.cut(first, first + group), scores, segment_len) for first in range(0, num_tiles, group)
    ]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _attend_group(args: AttendArgs, rows: TokenBlocks, scores: Scores, segment_len: int) -> tuple[Tensor, Tensor]:
    num_tiles, _, num_q_heads, _ = rows.q.shape
    form = args.pages.format
    page_size, num_kv_heads, v_head_dim = form.page_size, form.num_kv_heads, form.v_head_dim
    ratio = num_q_heads // num_kv_heads
    compute = torch.float64 if rows.q.dtype == torch.float64 else torch.float32
    # The query heads of a KV head are rows of one product: [kv_heads, tiles, TILE_LEN * ratio, .]
    q = (rows.q.to(compute) * scores.scale).unflatten(2, (num_kv_heads, ratio)).permute(2, 0, 1, 3, 4).flatten(2, 3)
    q = _with_aligned_rows(q)
    state = _Partial(
        acc=q.new_zeros(num_kv_heads, num_tiles, TILE_LEN * ratio, v_head_dim),
        maximum=q.new_full((num_kv_heads, num_tiles, TILE_LEN * ratio, 1), float("-inf")),
        total=q.new_zeros(num_kv_heads, num_tiles, TILE_LEN * ratio, 1),
    )
    for first in range(0, rows.pages.shape[1] * page_size, segment_len):
        keys = first + torch.arange(segment_len, device=q.device)
        state = state.merged(_segment(args, q, rows, keys, scores))
    if args.sinks is not None:
        sink = by_row(args.sinks, num_kv_heads, TILE_LEN).to(compute)
        sink = torch.where(state.total > 0, sink, float("-inf"))
        state = state.merged(_Partial(torch.zeros_like(state.acc), sink, torch.ones_like(state.total)))
    total = state.total.masked_fill(state.maximum == float("-inf"), 1)
    return by_token(state.acc / total, ratio), by_token(state.maximum + total.log(), ratio).squeeze(-1)


def _segment(args: AttendArgs, q: Tensor, rows: TokenBlocks, key: Tensor, scores: Scores) -> _Partial:
    """The softmax state of the keys with these places, integer [segment_len]."""
    page_size, num_kv_heads = args.pages.format.page_size, args.pages.format.num_kv_heads
    ratio = q.shape[2] // TILE_LEN
    page = rows.pages[:, (key // page_size).clamp(max=rows.pages.shape[1] - 1)].long()
    page = page.clamp(0, len(args.pages.k) - 1)  # of keys that no row sees, an engine's table may hold anything
    picked = args.pages.read_tokens(page, key % page_size)
    k, v = (_with_aligned_rows(side.to(q.dtype).permute(2, 0, 1, 3)).contiguous() for side in picked)
    hidden = rows.hidden(key, scores)
    # A dead V row meets a weight of 0, and 0 * NaN is NaN. A dead K row meets nothing but logits, replaced below.
    v.masked_fill_(hidden.all(1)[:, :, None], 0)
    logits = torch.matmul(q, k.transpose(2, 3))
    if scores.soft_cap:
        logits = torch.tanh(logits / scores.soft_cap) * scores.soft_cap
    if args.slopes is not None:
        slope = by_row(args.slopes, num_kv_heads, TILE_LEN).to(q.dtype)
        logits = logits + slope * (key - rows.kv_index[:, :, None]).repeat_interleave(ratio, 1)
    logits.masked_fill_(hidden.repeat_interleave(ratio, 1), float("-inf"))
    maximum = logits.amax(-1, keepdim=True)
    weights = (logits - maximum.masked_fill(maximum == float("-inf"), 0)).exp()
    acc = torch.matmul(weights, v)[..., : args.pages.format.v_head_dim]
    return _Partial(acc, maximum, weights.sum(-1, keepdim=True))


def _with_aligned_rows(rows: Tensor) -> Tensor:
    """Rows [..., dim] with zeros up to a multiple of 16 bytes: torch sums products in an order that depends on where in
    memory each of a batch's matrices begins."""
    return F.pad(rows, (0, -rows.shape[-1] % (16 // rows.element_size())))
