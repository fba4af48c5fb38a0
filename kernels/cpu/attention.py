"""Paged attention for CPUs: keys are gathered token by token, and torch's fused attention computes all heads at once.

A CPU waits for nobody when it reads a length, so shapes follow from the step's real lengths, and pads cost nothing. A
recorder notes a call as one launch. A key that a row does not see is replaced by one that its tile sees, since hidden
scores of -inf would turn into NaN where K or V of a dead slot is NaN.

The fused attention is aten's, which F.scaled_dot_product_attention calls on a CPU; it returns the log-sum-exp too:
https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.launch import run_as_launch
from rocm_attn.kernels.refs import attention as refs
from rocm_attn.kernels.tuning.tiles import next_power_of_2

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

# Elements of K and V, and of masks, that are held at the same time: 64 MiB of float32.
_GROUP_ELEMENTS = 1 << 24
_SHORTEST_TILE, _LONGEST_TILE = 16, 256


def paged_decode(args: AttendArgs, *, scores: Scores) -> None:
    """Attends for every sequence with exactly one new token; all other tokens of out and lse stay unchanged.

    Like refs.attention.paged_decode. A token without a key gets 0 and LSE -inf.
    """
    run_as_launch(_decode, args, scores)


def paged_extend(args: AttendArgs, *, scores: Scores) -> None:
    """Attends for every new token of every sequence; tokens at or past q_indptr[-1] get 0 and LSE -inf.

    Like refs.attention.paged_extend.
    """
    run_as_launch(_extend, args, scores)


@dataclass(frozen=True, slots=True, eq=False)
class _Tiles:
    """New tokens of one sequence each, and the keys that they may see.

    q:        [tiles, tile_len, q_heads, head_dim]
    row:      int32 [tiles], of the table
    first_page: int32 [tiles], page_no where the sequence's keys begin; None: 0
    kv_index: int64 [tiles, tile_len]: a token's place in its sequence's KV
    end:      int64 [tiles]: one past the last key that a token of the tile sees, 1 or more
    begin:    int64 [tiles]: the first key that a token of the tile sees, before the end
    num_keys: the most of end - begin
    """

    q: Tensor
    row: Tensor
    first_page: Tensor | None
    kv_index: Tensor
    begin: Tensor
    end: Tensor
    num_keys: int

    def cut(self, first: int, end: int) -> _Tiles:
        """Some of the tiles."""
        some = slice(first, end)
        begin, last = self.begin[some], self.end[some]
        pages = None if self.first_page is None else self.first_page[some]
        return _Tiles(self.q[some], self.row[some], pages, self.kv_index[some], begin, last, int((last - begin).max()))


def _decode(args: AttendArgs, scores: Scores) -> None:
    queries = args.queries
    q_len = queries.q_indptr.diff()
    is_one = q_len == 1
    kv_len, row, first_page = queries.kv_len.long(), queries.row_of_seq, queries.first_page
    has_keys = is_one & (kv_len > 0)
    num_served, num_all = int(has_keys.sum()), int(is_one.sum())
    token = None
    if num_served < len(kv_len) or num_served < args.q.shape[0]:
        if num_served < num_all:
            blind = queries.q_indptr[:-1][is_one & ~has_keys].long()
            args.out[blind] = 0
            if args.lse is not None:
                args.lse[blind] = float("-inf")
        if num_served == 0:
            return
        seq = has_keys.nonzero().flatten()
        token = queries.q_indptr[:-1][seq].long()
        kv_len, row = kv_len[seq], row[seq]
        first_page = None if first_page is None else first_page[seq]
    q = args.q if token is None else args.q[token]
    begin = (kv_len - 1 - scores.window_left).clamp(min=0) if scores.windowed else torch.zeros_like(kv_len)
    num_keys = int((kv_len - begin).max())
    out, lse = _attend(args, _Tiles(q[:, None], row, first_page, kv_len[:, None] - 1, begin, kv_len, num_keys), scores)
    if token is None:
        args.out.copy_(out[:, 0])
    else:
        args.out[token] = out[:, 0].to(args.out.dtype)
    if args.lse is not None:
        args.lse[slice(None) if token is None else token] = lse[:, 0]


def _extend(args: AttendArgs, scores: Scores) -> None:
    queries = args.queries
    q_indptr = queries.q_indptr.long()
    q_len, kv_len = q_indptr.diff(), queries.kv_len.long()
    num_tokens, most, has_blind = (
        (int(each) for each in torch.stack((q_indptr[-1], q_len.max(), (kv_len < q_len).any())).tolist())
        if len(kv_len)
        else (0, 0, 0)
    )
    if has_blind or not 0 < num_tokens <= args.q.shape[0]:
        # A token that comes before its sequence's first key sees nothing; such steps are rare.
        refs.paged_extend(args, scores=scores)
        return
    num_seqs = int((q_len > 0).sum())
    tile_len = min(max(next_power_of_2(-(-num_tokens // num_seqs)), _SHORTEST_TILE), _LONGEST_TILE, most)
    tiles_of_seq = (q_len + (tile_len - 1)) // tile_len
    seq = torch.repeat_interleave(tiles_of_seq)
    first = tiles_of_seq.cumsum(0) - tiles_of_seq
    offset = ((torch.arange(len(seq)) - first[seq]) * tile_len)[:, None] + torch.arange(tile_len)
    is_full = len(seq) * tile_len == num_tokens
    if is_full:
        q = args.q[:num_tokens].unflatten(0, (-1, tile_len))
    else:
        offset = torch.minimum(offset, q_len[seq][:, None] - 1)
        q = args.q[q_indptr[seq][:, None] + offset]
    kv_index = (kv_len - q_len)[seq][:, None] + offset
    end = kv_index[:, -1] + 1 if scores.causal else kv_len[seq]
    begin = (kv_index[:, 0] - scores.window_left).clamp(min=0) if scores.windowed else torch.zeros_like(end)
    first_page = None if queries.first_page is None else queries.first_page[seq]
    tiles = _Tiles(q, queries.row_of_seq[seq], first_page, kv_index, begin, end, int((end - begin).max()))
    out, lse = (each.flatten(0, 1) for each in _attend(args, tiles, scores))
    if not is_full:
        # The rows of a sequence are consecutive: all of its tiles but the last are full.
        of_token = torch.repeat_interleave(q_len)
        place = first[of_token] * tile_len + torch.arange(num_tokens) - q_indptr[of_token]
        out, lse = out.index_select(0, place), lse.index_select(0, place)
    args.out[:num_tokens].copy_(out)
    args.out[num_tokens:].zero_()
    if args.lse is not None:
        args.lse[:num_tokens].copy_(lse)
        args.lse[num_tokens:].fill_(float("-inf"))


def _attend(args: AttendArgs, tiles: _Tiles, scores: Scores) -> tuple[Tensor, Tensor]:
    """Float32 outputs [tiles, tile_len, q_heads, v_head_dim] and LSE [tiles, tile_len, q_heads]."""
    num_tiles, tile_len, num_q_heads, head_dim = tiles.q.shape
    of_tile = tiles.num_keys * (2 * args.heads[0] * head_dim + num_q_heads * tile_len)
    group = max(1, _GROUP_ELEMENTS // of_tile)
    if group >= num_tiles:
        return _attend_group(args, tiles, scores)
    parts = [_attend_group(args, tiles.cut(first, first + group), scores) for first in range(0, num_tiles, group)]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _attend_group(args: AttendArgs, tiles: _Tiles, scores: Scores) -> tuple[Tensor, Tensor]:
    """Does the same as `_attend`, for tiles whose keys are held at the same time."""
    num_tiles, tile_len = tiles.q.shape[:2]
    num_kv_heads, ratio = args.heads
    key = tiles.begin[:, None] + torch.arange(tiles.num_keys)
    k, v = _gathered(args, tiles, key)
    # The query heads of a KV head are rows of one product: [tiles, kv_heads, ratio * tile_len, head_dim].
    q = tiles.q.float().unflatten(2, (num_kv_heads, ratio)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    bias = _bias(args, tiles, key, scores)
    out, lse = _fused(q, k, v, attn_mask=bias, scale=scores.scale)
    out = out.unflatten(2, (ratio, tile_len)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    lse = lse.unflatten(2, (ratio, tile_len)).permute(0, 3, 1, 2).flatten(2, 3)
    if args.sinks is not None:
        out = out * torch.sigmoid(lse - args.sinks)[..., None]
        lse = torch.logaddexp(lse, args.sinks)
    return out, lse


def _gathered(args: AttendArgs, tiles: _Tiles, key: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 K and V of the tiles' keys, [tiles, kv_heads, keys, dim]; after a tile's last key, that key again."""
    pages, table = args.pages, args.table
    page_size = pages.format.page_size
    key = torch.minimum(key, tiles.end[:, None] - 1)
    page_no = key // page_size
    if tiles.first_page is not None:
        page_no += tiles.first_page[:, None]
    page = table[tiles.row[:, None], page_no.clamp_(max=table.shape[1] - 1)]
    # A table that is wrong has set the error word, and the step is not used; it may not stop the other sequences here.
    slot = (page.long().clamp_(0, len(pages.raw_k) - 1) * page_size + key % page_size).flatten()
    k, v = (
        side.flatten(0, 1).index_select(0, slot).unflatten(0, key.shape).transpose(1, 2).float()
        for side in (pages.raw_k, pages.raw_v)
    )
    return k, v


def _bias(args: AttendArgs, tiles: _Tiles, key: Tensor, scores: Scores) -> Tensor:
    """Float32 [tiles, 1 or kv_heads, ratio * tile_len or 1, keys]: -inf for a key that a row does not see."""
    num_kv_heads, ratio = args.heads
    key, kv_index = key[:, None], tiles.kv_index[:, :, None]
    hidden = key > kv_index if scores.causal else key >= tiles.end[:, None, None]
    if scores.windowed:
        hidden = hidden | (key < kv_index - scores.window_left)
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None]
    if args.slopes is not None:
        slopes = args.slopes.view(num_kv_heads, ratio, 1, 1)
        return (bias[:, None] + slopes * (key - kv_index)[:, None, None]).flatten(2, 3)
    return bias if tiles.kv_index.shape[1] == 1 else bias.repeat(1, 1, ratio, 1)
