"""Paged attention for CPUs: keys are gathered token by token, and torch's fused attention computes all heads at once.

A CPU reads a length without a wait, so shapes follow from the step's real lengths, and pads cost nothing. A
recorder notes a call as one launch. A key that a row does not see is replaced by one that its tile sees, since hidden
scores of -inf would turn into NaN where K or V of a dead slot is NaN.

The fused attention is aten's, which F.scaled_dot_product_attention calls on a CPU; it returns the log-sum-exp too:
https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rocm_attn.kernels.attention.arguments import AttendArgs, Queries
from rocm_attn.kernels.attention.scores import Scores, Visibility
from rocm_attn.kernels.launch import as_launch
from rocm_attn.kernels.refs import attention as refs
from rocm_attn.kernels.tuning.tiles import next_power_of_2

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

# Elements of K and V, and of masks, that are held at the same time: 64 MiB of float32.
_GROUP_ELEMENTS = 1 << 24
_SHORTEST_TILE, _LONGEST_TILE = 16, 256
# The first words of a schedule: the sequences served, the keys of each, the tokens without keys, whether the tokens
# served are all of the step's, and whether all sequences have as many keys.
_HEAD = 5


def decode_words(num_seqs: int, max_kv_len: int) -> int:
    """int32 words for find_keys(): num_seqs sequences of up to max_kv_len keys."""
    return _HEAD + num_seqs * (1 + 3 * max_kv_len)


class _Keys(NamedTuple):
    """The keys of a decode step's R sequences with a new token and a key, N each, as views of the schedule's words.

    place:  int32 [R * N], of each key's page in the block table, flattened
    offset: int32 [R * N], of each key in its page; after a sequence's last key, that key again
    bias:   int32 [R * N], bits of float32: -inf after a sequence's last key
    """

    place: Tensor
    offset: Tensor
    bias: Tensor

    @classmethod
    def of(cls, words: Tensor, num_keys: int) -> _Keys:
        """num_keys: R * N"""
        return cls(*words.narrow(0, _HEAD, 3 * num_keys).view(3, num_keys).unbind())


def _tokens(words: Tensor, num_keys: int, num: int, num_blind: int) -> tuple[Tensor, Tensor]:
    """int32 [R] and [num_blind]: the new tokens of sequences with a key and of those without one; see `_Keys`."""
    token, blind = torch.split(words.narrow(0, _HEAD + 3 * num_keys, num + num_blind), [num, num_blind])
    return token, blind


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


@as_launch
def find_keys(queries: Queries, words: Tensor, *, page_size: int, table_width: int, visibility: Visibility) -> None:
    """Finds the keys of a decode step, for all of its layers.

    words: int32, as many as decode_words() says, written; table_width: of the block table
    """
    kv_len, first = queries.kv_len.long(), queries.q_indptr[:-1]
    is_one = queries.q_indptr.diff() == 1
    seq = (is_one & (kv_len > 0)).nonzero().flatten()
    blind = first[is_one & (kv_len <= 0)]
    token, end = first[seq], kv_len[seq]
    begin = refs.window_start(end - 1, visibility).clamp(min=0) if visibility.windowed else torch.zeros_like(end)
    num_keys = int((end - begin).max()) if len(seq) else 0
    is_whole = len(seq) == queries.num_tokens and torch.equal(token, torch.arange(len(seq), dtype=token.dtype))
    key = begin[:, None] + torch.arange(num_keys)
    is_key = key < end[:, None]
    words[:_HEAD] = torch.tensor([len(seq), num_keys, len(blind), is_whole, is_key.all()])
    keys = _Keys.of(words, key.numel())
    keys.bias.view(torch.float32).copy_(torch.where(is_key, 0.0, float("-inf")).flatten())
    key = torch.minimum(key, end[:, None] - 1)
    for kept, found in zip(_tokens(words, key.numel(), len(token), len(blind)), (token, blind), strict=True):
        kept.copy_(found)
    keys.place.copy_((seq[:, None] * table_width + (key // page_size).clamp(max=table_width - 1)).flatten())
    keys.offset.copy_((key % page_size).flatten())


@as_launch
def paged_decode(args: AttendArgs, block_table: Tensor, *, scores: Scores) -> None:
    """Attends for every sequence with exactly one new token; all other tokens of out and lse stay unchanged.

    Like refs.attention.paged_decode. A token without a key gets 0 and LSE -inf.

    args:        with a schedule that find_keys() has written
    block_table: int32 [S, table_width], contiguous: the pages of each sequence
    """
    num_seqs, num_keys, num_blind, is_whole, is_even = args.schedule.narrow(0, 0, _HEAD).tolist()
    token, blind = _tokens(args.schedule, num_seqs * num_keys, num_seqs, num_blind) if not is_whole else (None, None)
    if num_blind:
        args.out[blind] = 0
        if args.lse is not None:
            args.lse[blind] = float("-inf")
    if not num_seqs:
        return
    keys = _Keys.of(args.schedule, num_seqs * num_keys)
    bias = None if is_even else keys.bias.view(torch.float32).view(num_seqs, 1, 1, num_keys)
    pages, (num_kv_heads, ratio) = args.pages, args.heads
    slot = torch.add(keys.offset, block_table.view(-1).index_select(0, keys.place), alpha=pages.format.page_size)
    k, v = _rows(pages.raw_k, slot, num_seqs), _rows(pages.raw_v, slot, num_seqs)
    q = args.q if token is None else args.q.index_select(0, token)
    q = q.float().view(num_seqs, num_kv_heads, ratio, -1)
    out, lse = _fused(q, k, v, attn_mask=bias, scale=scores.scale)
    if args.sinks is not None:
        out, lse = _with_sinks(out, lse, args.sinks.view(num_kv_heads, ratio))
    if token is None:
        args.out.view_as(out).copy_(out)
    else:
        args.out[token] = out.flatten(1, 2).to(args.out.dtype)
    if args.lse is not None:
        args.lse[slice(None) if token is None else token] = lse.flatten(1)


def _rows(side: Tensor, slot: Tensor, num_tiles: int) -> Tensor:
    """Float32 rows of slots [tiles * keys] of K pages or V pages, [tiles, kv_heads, keys, dim]."""
    rows = side.flatten(0, 1).index_select(0, slot)
    return rows.view(num_tiles, -1, *rows.shape[1:]).transpose(1, 2).float()


@as_launch
def paged_extend(args: AttendArgs, *, scores: Scores) -> None:
    """Attends for every new token of every sequence; tokens at or past q_indptr[-1] get 0 and LSE -inf.

    Like refs.attention.paged_extend.
    """
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
    seen = scores.visibility
    end = refs.end_key(kv_index[:, -1], kv_len[seq], seen)
    begin = refs.window_start(kv_index[:, 0], seen).clamp(min=0) if seen.windowed else torch.zeros_like(end)
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
    tile_len = tiles.q.shape[1]
    num_kv_heads, ratio = args.heads
    key = tiles.begin[:, None] + torch.arange(tiles.num_keys)
    k, v = _gathered(args, tiles, key)
    # The query heads of a KV head are rows of one product: [tiles, kv_heads, ratio * tile_len, head_dim].
    q = tiles.q.float().unflatten(2, (num_kv_heads, ratio)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    bias = _bias(tiles, key, ratio, scores)
    out, lse = _fused(q, k, v, attn_mask=bias, scale=scores.scale)
    out = out.unflatten(2, (ratio, tile_len)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    lse = lse.unflatten(2, (ratio, tile_len)).permute(0, 3, 1, 2).flatten(2, 3)
    return (out, lse) if args.sinks is None else _with_sinks(out, lse, args.sinks)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out [..., heads, v_head_dim] and lse [..., heads] with the sinks' weight in them."""
    return out * torch.sigmoid(lse - sinks)[..., None], torch.logaddexp(lse, sinks)


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
    return _rows(pages.raw_k, slot, len(key)), _rows(pages.raw_v, slot, len(key))


def _bias(tiles: _Tiles, key: Tensor, ratio: int, scores: Scores) -> Tensor:
    """Float32 [tiles, 1, ratio * tile_len or 1, keys]: -inf for a key that a row does not see."""
    key, kv_index, seen = key[:, None], tiles.kv_index[:, :, None], scores.visibility
    hidden = key >= refs.end_key(kv_index, tiles.end[:, None, None], seen)
    if seen.windowed:
        hidden = hidden | (key < refs.window_start(kv_index, seen))
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None]
    # Without a window to either side all rows see the same keys.
    return bias.repeat(1, 1, ratio, 1) if hidden.shape[1] > 1 else bias
