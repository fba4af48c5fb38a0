"""Torch twins of the deterministic attention kernels: on a CPU, the same bits for a token in any batch and any chunk.

Tiles have TILE_LEN rows and segments segment_len keys, whatever the step: every product has one shape, of which only
the number in the batch varies, and every sum is over one length. Rows without a token and keys that a row does not see
add exact zeros. Segments lie at absolute places and are merged from left to right, as attention/segments.py has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles

TILE_LEN = 8
SEGMENT_LEN = 128
# Elements of gathered K, V and scores in flight.
_GROUP_ELEMENTS = 1 << 20


def segment_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    row_of_seq: Tensor,
    kv_len: Tensor,
    q_indptr: Tensor,
    schedule: Tensor | None,
    workspace: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    *,
    scores: Scores,
    most_segments: int,
    num_programs: int,
    tiles: SegmentTiles | None,
) -> None:
    """Attention of every sequence with exactly one new token; all other tokens of out and lse stay as they are.

    The arguments are launch_segment_decode's; schedule, workspace, and those behind scores have no meaning here.
    """
    mine, results = out.clone(), None if lse is None else lse.clone()
    segment_extend(
        q,
        k_pages,
        v_pages,
        table,
        row_of_seq,
        kv_len,
        q_indptr,
        None,
        mine,
        results,
        sinks,
        slopes,
        scores=scores,
        max_q_len=q.shape[0],
        tiles=None,
    )
    seq_of_token, is_token = _seq_of_token(q_indptr, q.shape[0])
    is_mine = is_token & (q_indptr.diff()[seq_of_token] == 1)
    out.copy_(torch.where(is_mine[:, None, None], mine, out))
    if lse is not None and results is not None:
        lse.copy_(torch.where(is_mine[:, None], results, lse))


def segment_extend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    row_of_seq: Tensor,
    kv_len: Tensor,
    q_indptr: Tensor,
    schedule: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    *,
    scores: Scores,
    max_q_len: int,
    tiles: SegmentTiles | None,
    segment_len: int = SEGMENT_LEN,
) -> None:
    """Attention of every new token of every sequence; tokens at or past q_indptr[-1] get 0 and LSE -inf.

    The arguments are launch_segment_extend's; schedule and tiles have no meaning here, segments have segment_len keys.
    Without a schedule there is no min_q_len. The work is proportional to table.shape[1]: pass the table narrowed to the
    pages that the step needs.
    """
    num_tokens, num_seqs = q.shape[0], kv_len.shape[0]
    if num_tokens == 0 or num_seqs == 0:
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    num_tiles = min(num_tokens // TILE_LEN + num_seqs, num_seqs * -(-max(max_q_len, 1) // TILE_LEN))
    q_len = q_indptr.diff()
    tile_end = ((q_len + (TILE_LEN - 1)) // TILE_LEN).cumsum(0)
    tile_start = tile_end - (q_len + (TILE_LEN - 1)) // TILE_LEN
    tile = torch.arange(num_tiles, device=q.device)
    seq_of_tile = torch.searchsorted(tile_end, tile, right=True).clamp(max=num_seqs - 1)
    # [tiles, TILE_LEN]: place of each row among the sequence's new tokens; at or past q_len in rows without a token
    offset = ((tile - tile_start[seq_of_tile]) * TILE_LEN)[:, None] + torch.arange(TILE_LEN, device=q.device)
    has_token = offset < q_len[seq_of_tile][:, None]
    token = torch.where(has_token, q_indptr[seq_of_tile][:, None] + offset, 0)
    kv_index = (kv_len - q_len)[seq_of_tile][:, None] + offset
    end_key = kv_index + 1 if scores.causal else kv_len[seq_of_tile][:, None].expand_as(kv_index)
    rows = _Rows(
        q=torch.where(has_token[:, :, None, None], q[token], 0),
        pages=table[row_of_seq[seq_of_tile]],
        kv_index=kv_index,
        end_key=torch.where(has_token, end_key, 0),
    )
    result, result_lse = _attend(rows, k_pages, v_pages, sinks, slopes, scores, segment_len)

    seq_of_token, is_token = _seq_of_token(q_indptr, num_tokens)
    # The rows of a sequence are consecutive: its tiles are, and all but the last are full.
    row = tile_start[seq_of_token] * TILE_LEN + torch.arange(num_tokens, device=q.device) - q_indptr[seq_of_token]
    row_of_token = torch.where(is_token, row, 0)
    out.copy_(torch.where(is_token[:, None, None], result.flatten(0, 1).to(out.dtype)[row_of_token], 0))
    if lse is not None:
        result_lse = result_lse.flatten(0, 1).to(lse.dtype)[row_of_token]
        lse.copy_(torch.where(is_token[:, None], result_lse, float("-inf")))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of tiles.

    q:        [tiles, TILE_LEN, q_heads, head_dim]
    pages:    integer [tiles, width]: the tile's pages in order
    kv_index: integer [tiles, TILE_LEN]: a row's place in its sequence's KV
    end_key:  integer [tiles, TILE_LEN]: a row sees keys before it, from the beginning of its window on
    """

    q: Tensor
    pages: Tensor
    kv_index: Tensor
    end_key: Tensor

    def cut(self, first: int, end: int) -> _Rows:
        """Some of the tiles."""
        return _Rows(*(each[first:end] for each in (self.q, self.pages, self.kv_index, self.end_key)))


@dataclass(frozen=True, slots=True)
class _Partial:
    """What some keys give: acc [kv_heads, tiles, rows, v_head_dim], maximum and total [kv_heads, tiles, rows, 1]."""

    acc: Tensor
    maximum: Tensor
    total: Tensor

    def merged(self, right: _Partial) -> _Partial:
        """These keys, then those on their right."""
        maximum = torch.maximum(self.maximum, right.maximum)
        base = maximum.masked_fill(maximum == float("-inf"), 0)
        decay, weight = (self.maximum - base).exp(), (right.maximum - base).exp()
        return _Partial(self.acc * decay + right.acc * weight, maximum, self.total * decay + right.total * weight)


def _attend(
    rows: _Rows,
    k_pages: Tensor,
    v_pages: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    scores: Scores,
    segment_len: int,
) -> tuple[Tensor, Tensor]:
    """[tiles, TILE_LEN, q_heads, v_head_dim] and LSE [tiles, TILE_LEN, q_heads], a group of tiles at a time."""
    num_tiles, _, num_q_heads, head_dim = rows.q.shape
    elements = segment_len * (k_pages.shape[2] * (head_dim + v_pages.shape[3]) + TILE_LEN * num_q_heads)
    group = max(1, _GROUP_ELEMENTS // elements)
    parts = [
        _attend_group(rows.cut(first, first + group), k_pages, v_pages, sinks, slopes, scores, segment_len)
        for first in range(0, num_tiles, group)
    ]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _attend_group(
    rows: _Rows,
    k_pages: Tensor,
    v_pages: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    scores: Scores,
    segment_len: int,
) -> tuple[Tensor, Tensor]:
    num_tiles, _, num_q_heads, _ = rows.q.shape
    num_kv_heads, v_head_dim = v_pages.shape[2:]
    ratio = num_q_heads // num_kv_heads
    compute = torch.float64 if rows.q.dtype == torch.float64 else torch.float32
    # The query heads of a KV head are rows of one product: [kv_heads, tiles, TILE_LEN * ratio, .]
    q = (rows.q.to(compute) * scores.scale).unflatten(2, (num_kv_heads, ratio)).permute(2, 0, 1, 3, 4).flatten(2, 3)
    state = _Partial(
        acc=q.new_zeros(num_kv_heads, num_tiles, TILE_LEN * ratio, v_head_dim),
        maximum=q.new_full((num_kv_heads, num_tiles, TILE_LEN * ratio, 1), float("-inf")),
        total=q.new_zeros(num_kv_heads, num_tiles, TILE_LEN * ratio, 1),
    )
    slope = None if slopes is None else _by_row(slopes, num_kv_heads).to(compute)
    for first in range(0, rows.pages.shape[1] * k_pages.shape[1], segment_len):
        keys = first + torch.arange(segment_len, device=q.device)
        state = state.merged(_segment(q, rows, k_pages, v_pages, slope, keys, scores))
    if sinks is not None:
        sink = torch.where(state.total > 0, _by_row(sinks, num_kv_heads).to(compute), float("-inf"))
        state = state.merged(_Partial(torch.zeros_like(state.acc), sink, torch.ones_like(state.total)))
    total = state.total.masked_fill(state.maximum == float("-inf"), 1)
    return _by_token(state.acc / total, ratio), _by_token(state.maximum + total.log(), ratio).squeeze(-1)


def _segment(
    q: Tensor, rows: _Rows, k_pages: Tensor, v_pages: Tensor, slope: Tensor | None, key: Tensor, scores: Scores
) -> _Partial:
    """What the keys with these places, integer [segment_len], give."""
    page_size, ratio = k_pages.shape[1], q.shape[2] // TILE_LEN
    page = rows.pages[:, (key // page_size).clamp(max=rows.pages.shape[1] - 1)].long()
    k, v = (pages[page, key % page_size].to(q.dtype).permute(2, 0, 1, 3).contiguous() for pages in (k_pages, v_pages))
    hidden = key >= rows.end_key[:, :, None]
    if scores.windowed:
        hidden = hidden | (key < (rows.kv_index - scores.window_left)[:, :, None])
    # A dead V row meets a weight of 0, and 0 * NaN is NaN. A dead K row meets nothing but logits, replaced below.
    v.masked_fill_(hidden.all(1)[:, :, None], 0)
    logits = torch.matmul(q, k.transpose(2, 3))
    if scores.soft_cap:
        logits = torch.tanh(logits / scores.soft_cap) * scores.soft_cap
    if slope is not None:
        logits = logits + slope * (key - rows.kv_index[:, :, None]).repeat_interleave(ratio, 1)
    logits.masked_fill_(hidden.repeat_interleave(ratio, 1), float("-inf"))
    maximum = logits.amax(-1, keepdim=True)
    weights = (logits - maximum.masked_fill(maximum == float("-inf"), 0)).exp()
    return _Partial(torch.matmul(weights, v), maximum, weights.sum(-1, keepdim=True))


def _seq_of_token(q_indptr: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """token -> seq [num_tokens], and whether the token belongs to any (the tail at or past q_indptr[-1] does not)."""
    token = torch.arange(num_tokens, device=q_indptr.device, dtype=q_indptr.dtype)
    seq = torch.searchsorted(q_indptr[1:], token, right=True)
    return seq.clamp(max=q_indptr.shape[0] - 2), token < q_indptr[-1]


def _by_row(weights: Tensor, num_kv_heads: int) -> Tensor:
    """[q_heads] -> [kv_heads, 1, TILE_LEN * ratio, 1]: one weight for each row of a product."""
    return weights.view(num_kv_heads, 1, -1).repeat(1, TILE_LEN, 1).view(num_kv_heads, 1, -1, 1)


def _by_token(x: Tensor, ratio: int) -> Tensor:
    """[kv_heads, tiles, TILE_LEN * ratio, n] -> [tiles, TILE_LEN, q_heads, n], contiguous."""
    by_token: Tensor = x.unflatten(2, (TILE_LEN, ratio)).movedim(0, 2).flatten(2, 3)
    return by_token.contiguous()
