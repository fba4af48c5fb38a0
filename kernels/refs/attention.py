"""Torch twins of the paged attention kernels: the same arguments, any device, no Triton.

A CPU runs them too. So every shape follows from argument shapes and host numbers, nothing is read back from a tensor,
and a list of their torch operations can be replayed with other values in the same tensors.

The unit of work is a tile: `tile_len` consecutive new tokens of one sequence against all of its pages. Decode is the
case tile_len == 1. Softmax and accumulation are in float32, or float64 when q is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.kernels.attention.arguments import AttendArgs, Queries
from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW, Scores, Visibility
from rocm_attn.kernels.attention.visible_keys import PackedMask, VisibleKeys
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.tuning.tiles import next_power_of_2

# Elements of gathered K, V and scores in flight, 4 MiB of float32: the allocator then returns the same warm memory
# again. 4 MiB against everything at once: 32 sequences x 512 tokens, 8 KV heads of 128, 2 cores: 13 ms, 83 ms.
_GROUP_ELEMENTS = 1 << 20
_SHORTEST_TILE, _LONGEST_TILE = 8, 256


def paged_decode(args: AttendArgs, *, scores: Scores) -> None:
    """Attends for every sequence with exactly one new token; all other tokens of out and lse stay unchanged.

    Twin of launch_paged_decode; schedule and workspace have no meaning here. The work is proportional to max_kv_len.
    """
    queries, num_tokens = args.queries, args.q.shape[0]
    if num_tokens == 0 or queries.num_seqs == 0:
        return
    first_token = queries.q_indptr[:-1].clamp(max=num_tokens - 1)
    kv_len = queries.kv_len[:, None]
    tiles = TokenBlocks(
        q=args.q[first_token][:, None],
        pages=_pages_of(args),
        kv_index=kv_len - 1,
        window_start=window_start(kv_len - 1, scores.visibility),
        end_key=kv_len,
    )
    result, result_lse = _attend(args, tiles, scores)
    seq_of_token, is_token = seq_of_tokens(queries.q_indptr, num_tokens)
    mine = is_token & (queries.q_indptr.diff()[seq_of_token] == 1)
    args.out.copy_(torch.where(mine[:, None, None], result[:, 0].to(args.out.dtype)[seq_of_token], args.out))
    if args.lse is not None and result_lse is not None:
        args.lse.copy_(torch.where(mine[:, None], result_lse[:, 0].to(args.lse.dtype)[seq_of_token], args.lse))


def paged_extend(args: AttendArgs, *, scores: Scores, mask: VisibleKeys | None = None) -> None:
    """Attends for every new token of every sequence; tokens at or past q_indptr[-1] get 0 and LSE -inf.

    Twin of launch_paged_extend; schedule and workspace have no meaning here. Without a schedule there is no min_q_len:
    sequences with one new token are served too, with the result that decode has for them. The work is proportional to
    max_kv_len.
    """
    queries = args.queries
    if queries.num_tokens == 0:
        return
    if queries.num_seqs == 0:
        clear(args)
        return
    cut = tile_cut(queries, _tile_len(queries))
    cut.store(args, *_attend(args, TokenBlocks.of(args, cut, scores, mask), scores))


def clear(args: AttendArgs) -> None:
    """Writes the results of tokens of no sequence."""
    args.out.zero_()
    if args.lse is not None:
        args.lse.fill_(float("-inf"))


@dataclass(frozen=True, slots=True, eq=False)
class TileCut:
    """New tokens cut into tiles of one sequence each, tile after tile; all integer, rows as in [tiles, tile_len].

    first:     [S]      seq -> its first tile
    seq:       [tiles]  tile -> seq
    offset:    [rows]   place among the sequence's new tokens; at or past q_len in rows without a token
    has_token: [rows]   bool
    token:     [rows]   0 if there is none
    q_indptr:  [S + 1]  of the queries
    """

    first: Tensor
    seq: Tensor
    offset: Tensor
    has_token: Tensor
    token: Tensor
    q_indptr: Tensor

    def store(self, args: AttendArgs, result: Tensor, lse: Tensor | None) -> None:
        """Writes [tiles, tile_len, ...] to the tokens of out and lse; tokens of no sequence get clear()'s values."""
        num_tokens, tile_len = args.q.shape[0], self.offset.shape[1]
        seq_of_token, is_token = seq_of_tokens(self.q_indptr, num_tokens)
        # The rows of a sequence are consecutive: its tiles are, and all but the last are full.
        token = torch.arange(num_tokens, device=args.q.device)
        row = self.first[seq_of_token] * tile_len + token - self.q_indptr[seq_of_token]
        row_of_token = torch.where(is_token, row, 0).clamp(max=self.token.numel() - 1)
        # A lost sequence may have more tokens than max_q_len has tiles for: the others see nothing.
        is_token &= self.token.flatten()[row_of_token] == token
        result = result.flatten(0, 1).to(args.out.dtype)[row_of_token]
        args.out.copy_(torch.where(is_token[:, None, None], result, 0))
        if args.lse is not None and lse is not None:
            lse = lse.flatten(0, 1).to(args.lse.dtype)[row_of_token]
            args.lse.copy_(torch.where(is_token[:, None], lse, float("-inf")))


def tile_cut(queries: Queries, tile_len: int) -> TileCut:
    """The cut of at least one sequence into tiles of tile_len new tokens; enough tiles for any split of num_tokens."""
    num_seqs, device = queries.num_seqs, queries.q_indptr.device
    most_of_seq = max(-(-queries.max_q_len // tile_len), 1)
    num_tiles = min(queries.num_tokens // tile_len + num_seqs, num_seqs * most_of_seq)
    q_len = queries.q_indptr.diff()
    tiles_of_seq = ((q_len + (tile_len - 1)) // tile_len).clamp(max=most_of_seq)
    end = tiles_of_seq.cumsum(0)
    tile = torch.arange(num_tiles, device=device)
    seq = torch.searchsorted(end, tile, right=True).clamp(max=num_seqs - 1)
    first = end - tiles_of_seq
    offset = ((tile - first[seq]) * tile_len)[:, None] + torch.arange(tile_len, device=device)
    has_token = offset < q_len[seq][:, None]
    token = torch.where(has_token, queries.q_indptr[seq][:, None] + offset, 0)
    return TileCut(first, seq, offset, has_token, token, queries.q_indptr)


def _tile_len(queries: Queries) -> int:
    """About the average q_len: longer tiles waste rows on short sequences, shorter ones gather K and V more often."""
    average = next_power_of_2(-(-queries.num_tokens // queries.num_seqs))
    return min(max(average, _SHORTEST_TILE), _LONGEST_TILE, max(queries.max_q_len, 1))


def seq_of_tokens(q_indptr: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """token -> seq [num_tokens], and whether the token belongs to any (the tail at or past q_indptr[-1] does not)."""
    token = torch.arange(num_tokens, device=q_indptr.device, dtype=q_indptr.dtype)
    seq = torch.searchsorted(q_indptr[1:], token, right=True)
    return seq.clamp(max=q_indptr.shape[0] - 2), token < q_indptr[-1]


def _pages_of(args: AttendArgs) -> Tensor:
    """seq -> its pages in order, [S, width]: the table cut to the width that the longest sequence needs."""
    queries, first_page = args.queries, args.queries.first_page
    table = args.table[:, : max(-(-queries.max_kv_len // args.pages.keys.page_size), 1)]
    pages = table[queries.row_of_seq]
    if first_page is None:
        return pages
    width = table.shape[1]
    column = torch.arange(width, device=table.device) + first_page[:, None]
    return pages.gather(1, column.clamp(max=width - 1))


def window_start(kv_index: Tensor, visibility: Visibility) -> Tensor:
    """The first key of a token's window or chunk, which may lie before the sequence; no meaning without them."""
    start, chunk = kv_index - visibility.window_left, visibility.chunk
    return torch.maximum(start, kv_index - kv_index % chunk) if chunk else start


def end_key(kv_index: Tensor, kv_len: Tensor, visibility: Visibility) -> Tensor:
    """One past the last key that a token sees; int64, kv_index's shape or, if tokens see all keys, kv_len's."""
    if visibility.window_right == UNLIMITED_WINDOW:
        return kv_len.long()
    return torch.minimum(kv_index.long() + 1 + visibility.window_right, kv_len)


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The cells of tiles in a packed mask.

    first: int64 [tiles, tile_len]  a row's first cell
    start: int32 [tiles, 1]         the first key that has cells; rows see those before it
    """

    words: Tensor
    first: Tensor
    start: Tensor

    @classmethod
    def of(cls, mask: PackedMask, cut: TileCut, kv_len: Tensor) -> Cells:
        """The cells of the tiles of a cut. kv_len: [tiles, 1]"""
        start = mask.start[cut.seq][:, None]
        return cls(mask.words, mask.indptr[cut.seq][:, None] + cut.offset * (kv_len - start).long(), start)

    def cut(self, first: int, end: int) -> Cells:
        """The cells of some of the tiles."""
        return Cells(self.words, self.first[first:end], self.start[first:end])

    def visible(self, key: Tensor, is_cell: Tensor) -> Tensor:
        """True for each key that a row sees; is_cell: bool [tiles, tile_len, keys], others are not looked up."""
        start = self.start[:, :, None]
        is_seen = is_cell & (key < start)
        is_cell = is_cell & (key >= start)
        cell = torch.where(is_cell, self.first[:, :, None] + key - start, 0)
        return is_seen | is_cell & ((self.words[cell >> 5] >> (cell & 31).int()) & 1).bool()


@dataclass(frozen=True, slots=True, eq=False)
class TokenBlocks:
    """Consecutive new tokens of one sequence each, and the keys that they read.

    q:            [tiles, tile_len, q_heads, head_dim]
    pages:        integer [tiles, width]: the tile's pages in order
    kv_index:     integer [tiles, tile_len]: a row's place in its sequence's KV
    window_start: integer [tiles, tile_len]: in a windowed layer, the first key of a row's window
    end_key:      integer [tiles, tile_len]: a row sees keys before it; 0 gives output 0 and LSE -inf
    cells:        of a packed mask, which hides more keys
    """

    q: Tensor
    pages: Tensor
    kv_index: Tensor
    window_start: Tensor
    end_key: Tensor
    cells: Cells | None = None

    @classmethod
    def of(cls, args: AttendArgs, cut: TileCut, scores: Scores, mask: VisibleKeys | None) -> TokenBlocks:
        """The tiles of a cut; rows without a token see no key, and have the q of token 0."""
        kv_len = args.queries.kv_len[cut.seq][:, None]
        first_new_key = kv_len - args.queries.q_indptr.diff()[cut.seq][:, None]
        kv_index = first_new_key + cut.offset
        start, end = window_start(kv_index, scores.visibility), end_key(kv_index, kv_len, scores.visibility)
        if mask is not None:
            start, end = mask.first[cut.token].long(), mask.end[cut.token].long()
        return cls(
            q=args.q[cut.token],
            pages=_pages_of(args)[cut.seq],
            kv_index=kv_index,
            window_start=start,
            end_key=torch.where(cut.has_token, end, 0),
            cells=Cells.of(mask, cut, kv_len) if isinstance(mask, PackedMask) else None,
        )

    def cut(self, first: int, end: int) -> TokenBlocks:
        """Some of the tiles."""
        return TokenBlocks(
            q=self.q[first:end],
            pages=self.pages[first:end],
            kv_index=self.kv_index[first:end],
            window_start=self.window_start[first:end],
            end_key=self.end_key[first:end],
            cells=None if self.cells is None else self.cells.cut(first, end),
        )

    def hidden(self, key: Tensor, scores: Scores) -> Tensor:
        """True for each key that a row does not see, bool [tiles, tile_len, keys]. key: integer [keys]"""
        hidden = key >= self.end_key[:, :, None]
        if scores.visibility.windowed:
            hidden = hidden | (key < self.window_start[:, :, None])
        if self.cells is not None:
            hidden = hidden | ~self.cells.visible(key, ~hidden)
        return hidden


def _attend(args: AttendArgs, tiles: TokenBlocks, scores: Scores) -> tuple[Tensor, Tensor | None]:
    """Attends for each tile over its own pages, a group of tiles at a time.

    returns [tiles, tile_len, q_heads, v_head_dim] and LSE [tiles, tile_len, q_heads], in the compute dtype; no LSE
            if args wants none
    """
    keys, values = args.pages.keys, args.pages.values
    num_tiles, tile_len, num_q_heads, head_dim = tiles.q.shape
    num_keys = tiles.pages.shape[1] * keys.page_size
    elements = num_keys * (keys.num_heads * (head_dim + values.dim) + tile_len * num_q_heads)
    group = max(1, _GROUP_ELEMENTS // max(elements, 1))
    parts = [_attend_group(args, tiles.cut(first, first + group), scores) for first in range(0, num_tiles, group)]
    lse = [part_lse for _, part_lse in parts if part_lse is not None]
    return torch.cat([result for result, _ in parts]), torch.cat(lse) if lse else None


def _attend_group(args: AttendArgs, tiles: TokenBlocks, scores: Scores) -> tuple[Tensor, Tensor | None]:
    """Does the same as `_attend`, for tiles whose keys, values and scores are held at the same time."""
    keys = args.pages.keys
    tile_len, num_q_heads = tiles.q.shape[1:3]
    num_kv_heads, ratio = keys.num_heads, num_q_heads // keys.num_heads
    compute = torch.float64 if tiles.q.dtype == torch.float64 else torch.float32
    k, v = (side.to(compute) for side in _gather(args.pages, tiles.pages))
    key = torch.arange(k.shape[2], device=k.device)
    hidden = tiles.hidden(key, scores)
    unseeing = hidden.all(2)
    # A dead V row meets a probability of 0, and 0 * NaN is NaN. A dead K row meets nothing but scores, replaced below.
    v.masked_fill_(hidden.all(1)[:, :, None], 0)

    # The query heads of a KV head are rows of one product: [kv_heads, tiles, tile_len * ratio, .]
    rows = (tiles.q.to(compute) * scores.scale).unflatten(2, (num_kv_heads, ratio)).permute(2, 0, 1, 3, 4).flatten(2, 3)
    logits = torch.matmul(rows, k.transpose(2, 3))
    if scores.soft_cap:
        logits = torch.tanh(logits / scores.soft_cap) * scores.soft_cap
    if args.slopes is not None:
        distance = (key - tiles.kv_index[:, :, None]).repeat_interleave(ratio, 1)
        logits = logits + by_row(args.slopes, num_kv_heads, tile_len).to(compute) * distance
    logits.masked_fill_(hidden.repeat_interleave(ratio, 1), float("-inf"))
    if args.sinks is not None:
        sink = by_row(args.sinks, num_kv_heads, tile_len).to(compute).expand(*logits.shape[:3], 1)
        logits = torch.cat(
            [logits, sink.masked_fill(unseeing.repeat_interleave(ratio, 1)[..., None], float("-inf"))], -1
        )
        v = torch.cat([v, v.new_zeros(*v.shape[:2], 1, v.shape[3])], 2)
    attended = torch.matmul(logits.softmax(-1), v)
    result = by_token(attended, ratio).masked_fill_(unseeing[:, :, None, None], 0)
    return result, None if args.lse is None else by_token(logits.logsumexp(-1), ratio)


def by_row(weights: Tensor, num_kv_heads: int, tile_len: int) -> Tensor:
    """[q_heads] -> [kv_heads, 1, tile_len * ratio, 1]: one weight for each row of a product."""
    return weights.view(num_kv_heads, 1, -1).repeat(1, tile_len, 1).view(num_kv_heads, 1, -1, 1)


def by_token(x: Tensor, ratio: int) -> Tensor:
    """[kv_heads, tiles, tile_len * ratio, ...] -> [tiles, tile_len, q_heads, ...], contiguous."""
    rows: Tensor = x.unflatten(2, (-1, ratio)).movedim(0, 2).flatten(2, 3)
    return rows.contiguous()


def _gather(pages: LayerPages, pages_of_tile: Tensor) -> Iterator[Tensor]:
    """Yields copies of the values of each tile's pages, K and V, [kv_heads, tiles, width * page_size, dim].

    Heads come first, so that a batched product copies no more; whole pages are picked, in the pool's own order.
    """
    num_tiles, width = pages_of_tile.shape
    num_keys = width * pages.format.page_size
    # An engine's row may hold anything before the window and after the KV: no token sees it, and it need be no page.
    for side in pages.read_sides(pages_of_tile.flatten().clamp(0, len(pages.k) - 1)):
        yield side.reshape(num_tiles, num_keys, *side.shape[2:]).permute(2, 0, 1, 3).contiguous()
