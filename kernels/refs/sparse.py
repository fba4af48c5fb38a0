"""Torch twins of the kernels of sparse attention: the same arguments, any device, no Triton.

Like in refs/attention.py every shape follows from argument shapes and host numbers, and nothing is read back: a list of
their torch operations can be replayed with other values in the same tensors. The work is proportional to max_kv_len and
to the selection's width. Memory besides the arguments is bounded, except for the data that select one token's units.
"""

import torch
from torch import Tensor

from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.sparse.arguments import (
    BAD_COUNT,
    NO_UNIT,
    NOT_ASCENDING,
    OUTSIDE,
    IndexArgs,
    Indexing,
    LastUnit,
    Pooling,
    SelectedArgs,
    SelectedKeys,
    SparseTokens,
)

# Words of 4 bytes that gathered keys, scores and values computed from them may take at a time: 4 MiB, and on a GPU 128.
# A token over 84k keys has 24 million (an index key of 128), and with launches for each few keys the GPU would be idle.
_MOST_WORDS, _MOST_WORDS_ON_GPU = 1 << 20, 1 << 25


def select(args: IndexArgs, selection: SelectedKeys, *, indexing: Indexing) -> None:
    """Selects the units of every token. Twin of launch_select; a workspace has no meaning here."""
    max_units = indexing.max_units(args.tokens.max_kv_len)
    num_heads, dim = args.q.shape[1:]
    # For a key: itself, as it is stored and as it is computed with; products of the heads; places, of 8 bytes each. For
    # a unit: its scores, and the numbers that sort them.
    of_key = (2 * dim + 3 * num_heads + 2 * indexing.sets + 10) * _compute(args.q).itemsize // 4
    words = indexing.unit_keys * of_key + 20 * indexing.sets
    tokens_at_once, units_at_once = _cut(args.q, max_units, words)
    for first, end in _parts(len(args.q), tokens_at_once):
        part = args._replace(
            q=args.q[first:end],
            weights=None if args.weights is None else args.weights[first:end],
            tokens=_tokens(args.tokens, first, end),
        )
        scores = args.q.new_empty(end - first, indexing.sets, max_units, dtype=_compute(args.q))
        for first_unit, end_unit in _parts(max_units, units_at_once):
            index_scores(part, scores[:, :, first_unit:end_unit], indexing=indexing, first_unit=first_unit)
        if args.among is not None:
            scores.masked_fill_(_left_out(_part(args.among, first, end), max_units), float("nan"))
        mine = _part(selection, first, end)
        top_k(scores, part.tokens, mine, indexing=indexing)


def _part(selection: SelectedKeys, first: int, end: int) -> SelectedKeys:
    return selection._replace(units=selection.units[first:end], counts=selection.counts[first:end])


def _left_out(among: SelectedKeys, max_units: int) -> Tensor:
    """bool [T, sets, max_units]: units that are in no block. Twin of launch_leave_out."""
    num_blocks = -(-max_units // among.unit_tokens)
    is_block = torch.arange(among.width, device=among.units.device) < among.counts[:, :, None]
    # Entries past the count go to a column of their own.
    at = torch.where(is_block, among.units, num_blocks).long()
    kept = at.new_zeros(*at.shape[:2], num_blocks + 1, dtype=torch.bool).scatter_(2, at, True)
    return ~kept[:, :, :num_blocks].repeat_interleave(among.unit_tokens, 2)[:, :, :max_units]


def index_scores(args: IndexArgs, scores: Tensor, *, indexing: Indexing, first_unit: int = 0) -> None:
    """Writes scores [T, sets, units], of the keys that each token sees; -inf if it sees none of a unit.

    Twin of launch_index_scores. Computes in float32, or float64 if q is float64.
    first_unit: the first unit of scores
    """
    num_tokens, num_heads, _ = args.q.shape
    compute, pages = _compute(args.q), args.pages
    first_key, end_key = (unit * indexing.unit_keys for unit in (first_unit, first_unit + scores.shape[2]))
    key = torch.arange(first_key, end_key, device=args.q.device)
    page, offset = _place(args.table, args.tokens.row_of_token, key.expand(num_tokens, -1), pages.keys)
    products = torch.einsum("thd,tkd->thk", args.q.to(compute), pages.keys[page, offset].to(compute))
    products = products * indexing.scale
    if indexing.rectified:
        products = products.relu()
    if args.weights is not None:
        products = products * args.weights.to(compute)[:, :, None]
    summed = products.unflatten(1, (indexing.sets, num_heads // indexing.sets)).sum(2)
    if pages.scale is not None:
        summed = summed * (pages.scale if pages.scale.dim() == 1 else pages.scale[page, offset][:, None]).to(compute)
    seen = key < (_visible(args.tokens) // indexing.key_tokens)[:, None, None]
    of_unit = summed.unflatten(2, (-1, indexing.unit_keys)), seen.unflatten(2, (-1, indexing.unit_keys))
    scores.copy_(_pooled(*of_unit, indexing.pooling))


def _pooled(scores: Tensor, seen: Tensor, pooling: Pooling) -> Tensor:
    """[T, sets, units, unit_keys] -> [T, sets, units]; -inf if no key of a unit is seen."""
    if pooling is Pooling.MAX:
        return scores.masked_fill(~seen, float("-inf")).amax(3)
    num_seen = seen.sum(3)
    mean = scores.masked_fill(~seen, 0).sum(3) / num_seen.clamp(min=1)
    return mean.masked_fill(num_seen == 0, float("-inf"))


def top_k(scores: Tensor, tokens: SparseTokens, selection: SelectedKeys, *, indexing: Indexing) -> None:
    """Selects the units with the largest scores of every token's candidates. Twin of launch_top_k."""
    visible = _visible(tokens)
    whole, rest = visible // indexing.unit_tokens, visible % indexing.unit_tokens
    candidates = whole + (rest > 0) * (indexing.last_unit is LastUnit.SCORED)
    unit = torch.arange(scores.shape[2], device=scores.device)
    num_units = candidates[:, None, None]
    forced = (unit < indexing.first) | (unit >= num_units - indexing.last)
    # 2: forced, 1: has a score, 0: is not chosen.
    rank = torch.where(unit < num_units, torch.where(forced, 2, (~scores.isnan()).int()), 0)
    comparable = scores.masked_fill(scores.isnan(), float("-inf"))
    by_score = comparable.sort(dim=2, descending=True, stable=True)[1]
    ranked = rank.gather(2, by_score).sort(dim=2, descending=True, stable=True)
    best = by_score.gather(2, ranked[1])[:, :, : indexing.top]
    no_unit = torch.iinfo(torch.int32).max
    units = torch.where(ranked[0][:, :, : indexing.top] > 0, best, no_unit).sort(2)[0]
    width = selection.width
    units = torch.nn.functional.pad(units, (0, width - units.shape[2]), value=no_unit)
    if indexing.last_unit is LastUnit.ADDED:
        # The slot after those that are taken; it is the last number, so the order stays the same.
        added = torch.where(rest > 0, whole, no_unit)[:, None, None].expand(-1, indexing.sets, 1)
        units = torch.cat([units, added], 2).sort(2)[0][:, :, :width]
    is_unit = units != no_unit
    selection.units.copy_(torch.where(is_unit, units, NO_UNIT))
    selection.counts.copy_(is_unit.sum(2))


def selected_attention(args: SelectedArgs, *, scale: float) -> None:
    """Attends for every token over its selection. Twin of launch_selected_attention; there is no workspace here."""
    num_kv_heads, num_q_heads = args.heads[0], args.q.shape[1]
    num_keys = args.selection.width * args.selection.unit_tokens
    # For a key: K and V, as they are stored, computed with, and without unseen keys; logits, weights; places.
    dims = args.q.shape[2] + args.out.shape[2]
    words = (num_kv_heads * (3 * dims + 12) + 3 * num_q_heads) * _compute(args.q).itemsize // 4
    tokens_at_once, keys_at_once = _cut(args.q, num_keys, words)
    for first, end in _parts(len(args.q), tokens_at_once):
        out, lse = _attended(args, first, end, _parts(num_keys, keys_at_once), scale)
        args.out[first:end] = out.flatten(1, 2).to(args.out.dtype)
        if args.lse is not None:
            args.lse[first:end] = lse.flatten(1, 2).to(args.lse.dtype)


def _attended(
    args: SelectedArgs, first: int, end: int, keys: list[tuple[int, int]], scale: float
) -> tuple[Tensor, Tensor]:
    """out [tokens, kv_heads, ratio, v_head_dim] and lse [tokens, kv_heads, ratio] of tokens [first, end).

    keys: the parts of their selections, [first, end) of the places there
    """
    num_kv_heads, ratio = args.heads
    compute, device = _compute(args.q), args.q.device
    q = args.q[first:end].to(compute).unflatten(1, (num_kv_heads, ratio)) * scale
    sink = None if args.sinks is None else args.sinks.to(compute).view(num_kv_heads, ratio)
    if len(keys) == 1:
        return _attend(q, *selected_rows(args, first, end, torch.arange(*keys[0], device=device)), sink)
    out, lse = q.new_zeros(*q.shape[:3], args.out.shape[2]), q.new_full(q.shape[:3], float("-inf"))
    for first_key, end_key in keys:
        rows = selected_rows(args, first, end, torch.arange(first_key, end_key, device=device))
        part, part_lse = _attend(q, *rows, None)
        both = torch.logaddexp(lse, part_lse)
        out = out * _share(lse, both) + part * _share(part_lse, both)
        lse = both
    if sink is not None:
        with_sink = torch.where(lse == float("-inf"), lse, torch.logaddexp(lse, sink))
        out, lse = out * _share(lse, with_sink), with_sink
    return out, lse


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Like `_attended`, but over K and V of selected_rows(). q: [tokens, kv_heads, ratio, head_dim], times the scale"""
    logits = torch.einsum("thrd,thkd->thrk", q, k).masked_fill_(~seen[:, :, None], float("-inf"))
    lse = logits.logsumexp(3)
    if sink is not None:
        lse = torch.where(lse == float("-inf"), lse, torch.logaddexp(lse, sink))
    weights = (logits - lse.masked_fill(lse == float("-inf"), 0)[..., None]).exp()
    return torch.einsum("thrk,thkd->thrd", weights, v), lse


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """The weight of a part's output in the whole, by their LSEs; 0 if no key is seen."""
    return (part - whole.masked_fill(whole == float("-inf"), 0)).exp()[..., None]


def check_selection(selection: SelectedKeys, tokens: SparseTokens, faults: Tensor) -> None:
    """Sets bits of faults for each error in a selection. Twin of launch_check_selection."""
    units, visible = selection.units, _visible(tokens)
    counts = torch.where(visible[:, None] > 0, selection.counts, 0)
    num_units = (-(-visible // selection.unit_tokens))[:, None]
    listed = torch.arange(selection.width, device=units.device) < counts[:, :, None]
    outside = listed & ((units < 0) | (units >= num_units[:, :, None]))
    low = listed[:, :, 1:] & (units[:, :, 1:] <= units[:, :, :-1])
    bad_count = (counts < 0) | (counts > num_units.clamp(max=selection.width))
    for found, bit in ((bad_count, BAD_COUNT), (outside, OUTSIDE), (low, NOT_ASCENDING)):
        faults.bitwise_or_(found.any().int() * bit)


def selected_rows(args: SelectedArgs, first: int, end: int, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Some keys of the selections of tokens [first, end).

    key:     integer [keys], places in a selection: unit after unit, token after token
    returns: K [tokens, kv_heads, keys, head_dim] and V [.., v_head_dim], 0 for unseen keys and codes times scales;
             whether a key is seen, bool [tokens, kv_heads, keys]
    """
    selection, tokens, pages = args.selection, _tokens(args.tokens, first, end), args.pages
    num_kv_heads = args.heads[0]
    if isinstance(selection, SelectedKeys):
        unit_tokens = selection.unit_tokens
        entry = (key // unit_tokens).clamp(max=selection.width - 1)
        units = selection.units[first:end][:, :, entry]
        position = units.long() * unit_tokens + key % unit_tokens
        listed = (key // unit_tokens < selection.counts[first:end][:, :, None]) & (units >= 0)
    else:
        hidden = (_visible(tokens) - selection.width).clamp(min=0)
        position = hidden[:, None, None] + key
        listed = torch.ones_like(position, dtype=torch.bool)
    seen = listed & (position < _visible(tokens)[:, None, None])
    seen = seen.expand(-1, num_kv_heads, -1)
    position = torch.where(seen, position.expand(-1, num_kv_heads, -1), 0)
    page, offset = _place(args.table, tokens.row_of_token, position.flatten(1), pages.k)
    head = torch.arange(num_kv_heads, device=key.device)[:, None]
    at = page.unflatten(1, (num_kv_heads, -1)), offset.unflatten(1, (num_kv_heads, -1)), head
    if pages.record is not None:
        k = pages.record.at(*at).values(pages.format.encoding).to(_compute(args.q))
        k = k.masked_fill(~seen[..., None], 0)
        return k, k[..., : args.out.shape[2]], seen
    sides = []
    for rows, scale_values in ((pages.k, pages.k_scale), (pages.v, pages.v_scale)):
        side = rows[at].to(_compute(args.q))
        if scale_values is not None:
            side = side * _scale_values(scale_values, pages.format.scales, at).to(side.dtype)[..., None]
        sides.append(side.masked_fill(~seen[..., None], 0))
    return sides[0], sides[1], seen


def _scale_values(scale_values: Tensor, scales: Scales, at: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The scales of the rows of these places, in a shape that broadcasts to [tokens, kv_heads, keys]."""
    if scales is Scales.TOKEN:
        page, offset, head = at
        return scale_values[page, head, offset]
    return scale_values[:, None] if scales is Scales.HEAD else scale_values


def _place(table: Tensor, row: Tensor, index: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Page and offset of index [T, n] in the lines of the table; an index beyond the width gets its last page.

    pages: [pages, keys of a page, ...]
    """
    num_pages, page_len = pages.shape[:2]
    page_no = (index // page_len).clamp(max=table.shape[1] - 1)
    # Before and after what tokens see, the lines of an engine's table may hold anything.
    page = table[row.long()[:, None], page_no].clamp(0, num_pages - 1).long()
    return page, index % page_len


def _visible(tokens: SparseTokens) -> Tensor:
    """int64 [T]: the number of tokens of its sequence that each token sees."""
    token = torch.arange(len(tokens.position_of_token), device=tokens.position_of_token.device)
    return torch.where(token < tokens.num_tokens, tokens.position_of_token.long() + 1, 0)


def _tokens(tokens: SparseTokens, first: int, end: int) -> SparseTokens:
    return tokens._replace(
        row_of_token=tokens.row_of_token[first:end],
        position_of_token=tokens.position_of_token[first:end],
        num_tokens=tokens.num_tokens - first,
    )


def _compute(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _cut(q: Tensor, num: int, words: int) -> tuple[int, int]:
    """The number of tokens of q that are worked on at the same time, and of the `num` units or keys of each.

    words: of one unit or key, for one token
    """
    most = _MOST_WORDS_ON_GPU if q.is_cuda else _MOST_WORDS
    at_once = max(1, min(num, most // words))
    return max(1, most // (at_once * words)), at_once


def _parts(num: int, at_once: int) -> list[tuple[int, int]]:
    """[first, end) of at_once at a time."""
    return [(first, min(first + at_once, num)) for first in range(0, num, at_once)]
