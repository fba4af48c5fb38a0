"""Torch twins of the paged attention kernels: the same signatures, any device, no Triton.

They are also what a CPU runs. So every shape follows from argument shapes and host numbers, nothing is read back from
a tensor, and a list of their torch operations can be replayed with other values in the same tensors.

The unit of work is a tile: `tile_len` consecutive new tokens of one sequence against all of its pages. Decode is the
case tile_len == 1. Softmax and accumulation are in float32, or float64 when q is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.kernels.attention.packed_mask import PackedMask
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.cache.page_rows import PageRows, key_rows, value_rows
from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles, next_power_of_2

# Elements of gathered K, V and scores in flight, 4 MiB of float32: the allocator then hands the same warm memory out
# again. 4 MiB against everything at once: 32 sequences x 512 tokens, 8 KV heads of 128, 2 cores: 13 ms, 83 ms.
_GROUP_ELEMENTS = 1 << 20
_SHORTEST_TILE, _LONGEST_TILE = 8, 256


def paged_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    row_of_seq: Tensor,
    kv_len: Tensor,
    q_indptr: Tensor,
    schedule: Tensor | None,
    partials: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    *,
    scores: Scores,
    num_programs: int,
    tiles: DecodeTiles | None,
    first_page: Tensor | None = None,
) -> None:
    """Attention of every sequence with exactly one new token; all other tokens of out and lse stay as they are.

    The arguments are launch_paged_decode's; schedule, partials, num_programs and tiles have no meaning here.
    The work is proportional to table.shape[1]: pass the table narrowed to the pages that the step needs.
    """
    num_tokens = q.shape[0]
    if num_tokens == 0 or kv_len.shape[0] == 0:
        return
    first_token = q_indptr[:-1].clamp(max=num_tokens - 1)
    pages = table[row_of_seq]
    if first_page is not None:
        width = table.shape[1]
        column = torch.arange(width, device=table.device) + first_page[:, None]
        pages = pages.gather(1, column.clamp(max=width - 1))
    result, result_lse = _attend(
        q[first_token][:, None],
        key_rows(k_pages),
        value_rows(v_pages),
        pages,
        kv_len[:, None] - 1,
        kv_len[:, None] - 1 - scores.window_left,
        kv_len[:, None],
        sinks,
        slopes,
        scores=scores,
        want_lse=lse is not None,
    )
    seq_of_token, is_token = _seq_of_token(q_indptr, num_tokens)
    mine = is_token & (q_indptr.diff()[seq_of_token] == 1)
    out.copy_(torch.where(mine[:, None, None], result[:, 0].to(out.dtype)[seq_of_token], out))
    if lse is not None and result_lse is not None:
        lse.copy_(torch.where(mine[:, None], result_lse[:, 0].to(lse.dtype)[seq_of_token], lse))


def paged_extend(
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
    tiles: ExtendTiles | None,
    mask: PackedMask | None = None,
) -> None:
    """Attention of every new token of every sequence; tokens at or past q_indptr[-1] get 0 and LSE -inf.

    The arguments are launch_paged_extend's; schedule and tiles have no meaning here. Without a schedule there is no
    min_q_len: sequences with one new token are served too, with the result that decode has for them.
    The work is proportional to table.shape[1]: pass the table narrowed to the pages that the step needs.
    """
    num_tokens, num_seqs = q.shape[0], kv_len.shape[0]
    if num_tokens == 0:
        return
    if num_seqs == 0:
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    tile_len, num_tiles = _tile_shape(num_tokens, num_seqs, max_q_len)
    q_len = q_indptr.diff()
    tiles_of_seq = (q_len + (tile_len - 1)) // tile_len
    tile_end = tiles_of_seq.cumsum(0)
    tile_start = tile_end - tiles_of_seq

    tile = torch.arange(num_tiles, device=q.device)
    seq_of_tile = torch.searchsorted(tile_end, tile, right=True).clamp(max=num_seqs - 1)
    # [tiles, tile_len]: place of each row among the sequence's new tokens; at or past q_len in rows without a token
    offset = ((tile - tile_start[seq_of_tile]) * tile_len)[:, None] + torch.arange(tile_len, device=q.device)
    has_token = offset < q_len[seq_of_tile][:, None]
    token = torch.where(has_token, q_indptr[seq_of_tile][:, None] + offset, 0)
    first_new_key = (kv_len - q_len)[seq_of_tile][:, None]
    kv_index = position = first_new_key + offset
    end_key = kv_index + 1 if scores.causal and mask is None else kv_len[seq_of_tile][:, None]
    cells = None
    if mask is not None:
        position = torch.maximum(mask.positions[token], first_new_key)
        cells = _Cells(mask.words, mask.indptr[seq_of_tile][:, None] + offset * kv_len[seq_of_tile][:, None].long())
    result, result_lse = _attend(
        q[token],
        key_rows(k_pages),
        value_rows(v_pages),
        table[row_of_seq[seq_of_tile]],
        kv_index,
        position - scores.window_left,
        torch.where(has_token, end_key, 0),
        sinks,
        slopes,
        scores=scores,
        want_lse=lse is not None,
        cells=cells,
    )

    seq_of_token, is_token = _seq_of_token(q_indptr, num_tokens)
    # The rows of a sequence are consecutive: its tiles are, and all but the last are full.
    row = tile_start[seq_of_token] * tile_len + torch.arange(num_tokens, device=q.device) - q_indptr[seq_of_token]
    row_of_token = torch.where(is_token, row, 0)
    out.copy_(torch.where(is_token[:, None, None], result.flatten(0, 1).to(out.dtype)[row_of_token], 0))
    if lse is not None and result_lse is not None:
        result_lse = result_lse.flatten(0, 1).to(lse.dtype)[row_of_token]
        lse.copy_(torch.where(is_token[:, None], result_lse, float("-inf")))


@dataclass(frozen=True, slots=True, eq=False)
class _Cells:
    """The cells of tiles in a packed mask; first: int64 [tiles, tile_len], a row's first cell."""

    words: Tensor
    first: Tensor

    def visible(self, key: Tensor, is_cell: Tensor) -> Tensor:
        """Whether each row sees each key; is_cell: bool [tiles, tile_len, keys], others are not looked up."""
        cell = torch.where(is_cell, self.first[:, :, None] + key, 0)
        return is_cell & ((self.words[cell >> 5] >> (cell & 31).int()) & 1).bool()


def _seq_of_token(q_indptr: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """token -> seq [num_tokens], and whether the token belongs to any (the tail at or past q_indptr[-1] does not)."""
    token = torch.arange(num_tokens, device=q_indptr.device, dtype=q_indptr.dtype)
    seq = torch.searchsorted(q_indptr[1:], token, right=True)
    return seq.clamp(max=q_indptr.shape[0] - 2), token < q_indptr[-1]


def _tile_shape(num_tokens: int, num_seqs: int, max_q_len: int) -> tuple[int, int]:
    """(tile_len, num_tiles) such that the tiles of any split of num_tokens over num_seqs fit.

    About the average q_len: longer tiles waste rows on short sequences, shorter ones gather K and V more often.
    """
    tile_len = min(max(next_power_of_2(-(-num_tokens // num_seqs)), _SHORTEST_TILE), _LONGEST_TILE, max(max_q_len, 1))
    return tile_len, min(num_tokens // tile_len + num_seqs, num_seqs * max(-(-max_q_len // tile_len), 1))


def _attend(
    q: Tensor,
    keys: PageRows,
    values: PageRows,
    pages: Tensor,
    kv_index: Tensor,
    window_start: Tensor,
    end_key: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    *,
    scores: Scores,
    want_lse: bool,
    cells: _Cells | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of each tile over its own pages, a group of tiles at a time.

    q:            [tiles, tile_len, q_heads, head_dim]
    pages:        integer [tiles, width]: the tile's pages in order
    kv_index:     integer [tiles, tile_len]: a row's place in its sequence's KV
    window_start: integer [tiles, tile_len]: of a windowed layer, the first key that a row's window holds
    end_key:      integer [tiles, tile_len]: a row sees keys before it; 0 gives output 0 and LSE -inf
    cells:        of a packed mask, which hides keys besides
    returns   [tiles, tile_len, q_heads, v_head_dim] and [tiles, tile_len, q_heads], in the compute dtype
    """
    num_tiles, tile_len, num_q_heads, head_dim = q.shape
    num_keys, num_kv_heads = pages.shape[1] * keys.page_size, keys.num_heads
    elements = num_keys * (num_kv_heads * (head_dim + values.dim) + tile_len * num_q_heads)
    group = max(1, _GROUP_ELEMENTS // max(elements, 1))
    parts = [
        _attend_group(
            q[i : i + group],
            keys,
            values,
            pages[i : i + group],
            kv_index[i : i + group],
            window_start[i : i + group],
            end_key[i : i + group],
            sinks,
            slopes,
            scores=scores,
            want_lse=want_lse,
            cells=None if cells is None else _Cells(cells.words, cells.first[i : i + group]),
        )
        for i in range(0, num_tiles, group)
    ]
    lse = [part_lse for _, part_lse in parts if part_lse is not None]
    return torch.cat([result for result, _ in parts]), torch.cat(lse) if want_lse else None


def _attend_group(
    q: Tensor,
    keys: PageRows,
    values: PageRows,
    pages: Tensor,
    kv_index: Tensor,
    window_start: Tensor,
    end_key: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    *,
    scores: Scores,
    want_lse: bool,
    cells: _Cells | None,
) -> tuple[Tensor, Tensor | None]:
    """_attend for tiles whose keys, values and scores are held at the same time."""
    num_q_heads, num_kv_heads = q.shape[2], keys.num_heads
    ratio = num_q_heads // num_kv_heads
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32

    k = _gather(keys, pages).to(compute)
    v = _gather(values, pages).to(compute)
    key = torch.arange(k.shape[2], device=q.device)
    hidden = key >= end_key[:, :, None]
    if scores.windowed:
        hidden = hidden | (key < window_start[:, :, None])
    if cells is not None:
        hidden = hidden | ~cells.visible(key, ~hidden)
    unseeing = hidden.all(2)
    # A dead V row meets a probability of 0, and 0 * NaN is NaN. A dead K row meets nothing but scores, replaced below.
    v.masked_fill_(hidden.all(1)[:, :, None], 0)

    # The query heads of a KV head are rows of one product: [kv_heads, tiles, tile_len * ratio, .]
    rows = (q.to(compute) * scores.scale).unflatten(2, (num_kv_heads, ratio)).permute(2, 0, 1, 3, 4).flatten(2, 3)
    logits = torch.matmul(rows, k.transpose(2, 3))
    if scores.soft_cap:
        logits = torch.tanh(logits / scores.soft_cap) * scores.soft_cap
    if slopes is not None:
        distance = (key - kv_index[:, :, None]).repeat_interleave(ratio, 1)
        logits = logits + _by_row(slopes, num_kv_heads, q.shape[1]).to(compute) * distance
    logits.masked_fill_(hidden.repeat_interleave(ratio, 1), float("-inf"))
    if sinks is not None:
        sink = _by_row(sinks, num_kv_heads, q.shape[1]).to(compute).expand(*logits.shape[:3], 1)
        logits = torch.cat(
            [logits, sink.masked_fill(unseeing.repeat_interleave(ratio, 1)[..., None], float("-inf"))], -1
        )
        v = torch.cat([v, v.new_zeros(*v.shape[:2], 1, v.shape[3])], 2)
    attended = torch.matmul(logits.softmax(-1), v)

    result = _by_token(attended, ratio).masked_fill_(unseeing[:, :, None, None], 0)
    return result, _by_token(logits.logsumexp(-1), ratio) if want_lse else None


def _by_row(weights: Tensor, num_kv_heads: int, tile_len: int) -> Tensor:
    """[q_heads] -> [kv_heads, 1, tile_len * ratio, 1]: one weight for each row of a product."""
    return weights.view(num_kv_heads, 1, -1).repeat(1, tile_len, 1).view(num_kv_heads, 1, -1, 1)


def _by_token(x: Tensor, ratio: int) -> Tensor:
    """[kv_heads, tiles, tile_len * ratio, ...] -> [tiles, tile_len, q_heads, ...], contiguous."""
    by_token: Tensor = x.unflatten(2, (-1, ratio)).movedim(0, 2).flatten(2, 3)
    return by_token.contiguous()


def _gather(rows: PageRows, pages: Tensor) -> Tensor:
    """The tokens of each tile's pages as [kv_heads, tiles, width * page_size, dim], a copy.

    Heads first, so that a batched product copies no more; picked in the pool's own order, whole pages at a time.
    """
    num_keys = pages.shape[1] * rows.page_size
    picked = rows.read(pages.flatten()).reshape(len(pages), num_keys, rows.num_heads, rows.dim)
    return picked.permute(2, 0, 1, 3).contiguous()
