"""Scores of the units that tokens choose among: index queries against paged index keys.

    score[t, s, u] = pooling over keys r of unit u that t sees:   sum over heads h of set s:
                     weights[t, h] * f(scale * q[t, h] . k[r]) * factor of k[r]

A program takes a block of tokens and every splits-th block of keys of their sequence, so that work is shared out evenly
at any length. Products are computed as k q^T: keys fill the long side of the matrix unit, and the sum over heads stays
mostly within a thread's own registers. Keys are loaded once for all tokens of a block that share a sequence; if
sequences meet in a block, it is walked once for each of them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.attention.coded import half_query
from rocm_attn.kernels.backend import on_nvidia
from rocm_attn.kernels.cache.codes import decoded
from rocm_attn.kernels.cache.page_format import Encoding
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.sparse.arguments import IndexArgs, Indexing, LastUnit, Pooling, SelectedKeys
from rocm_attn.kernels.sparse.candidates import launch_leave_out
from rocm_attn.kernels.sparse.cuts import index_splits, select_chunk, select_words, top_k_cut
from rocm_attn.kernels.sparse.places import candidate_units, visible_tokens
from rocm_attn.kernels.sparse.top_k import launch_top_k
from rocm_attn.kernels.tuning.sparse_tiles import IndexTiles
from rocm_attn.kernels.tuning.tiles import next_power_of_2

_TYPES = {Encoding.E4M3FN.number: tl.float8e4nv, Encoding.E4M3FNUZ.number: tl.float8e4b8}


class IndexGeometry(NamedTuple):
    """The values that scoring is compiled for.

    DIM, D_COLUMNS:      elements of a key, and padding
    ENCODING:            of keys; Encoding's number
    CODED_Q:             whether q is in that encoding too
    TOKEN_SCALES:        whether each key has a scale
    PAGE_KEYS:           index keys of a page
    KEY_BLOCK:           keys of a block, whole units
    TOKENS:              tokens of a block
    SETS, SET_COLUMNS:   selections of a token, and padding
    HEADS, HEAD_COLUMNS: index heads of a set, and padding
    KEY_TOKENS:          tokens of a key
    UNIT_KEYS:           keys of a unit
    RECTIFIED, MEAN:     whether products are cut at 0, whether a unit's score is the mean
    LAST_SCORED:         whether a unit that a token sees a part of has a score
    STAGES:              key blocks whose loads are in flight
    """

    DIM: int
    D_COLUMNS: int
    ENCODING: int
    CODED_Q: bool
    TOKEN_SCALES: bool
    PAGE_KEYS: int
    KEY_BLOCK: int
    TOKENS: int
    SETS: int
    SET_COLUMNS: int
    HEADS: int
    HEAD_COLUMNS: int
    KEY_TOKENS: int
    UNIT_KEYS: int
    RECTIFIED: bool
    MEAN: bool
    LAST_SCORED: bool
    STAGES: int


class Columns(NamedTuple):
    """The columns of products, and their lines: a line has the columns of a token and a set.

    weight:    [COLUMNS], or None
    is_head:   [COLUMNS], whether a column is a head of a token
    num_keys:  [TOKENS * SET_COLUMNS], keys that a line's token sees
    num_units: [TOKENS * SET_COLUMNS], candidates of a line
    line:      [TOKENS * SET_COLUMNS], where a line's scores are written; -1: nowhere
    """

    weight: Any
    is_head: Any
    num_keys: Any
    num_units: Any
    line: Any


class Keys(NamedTuple):
    """Index keys of one sequence: pages, strides between pages and keys; scales; its line of the table, its width."""

    at: Any
    page: Any
    key: Any
    scale: Any
    pages: Any
    width: Any


@constexpr_function
def _multiplies_codes(encoding: int) -> bool:
    """True if the target's matrix unit multiplies codes of an encoding directly."""
    target = None if knobs.runtime.interpret else current_target()
    if target is None:
        return False
    if target.backend == "cuda":
        return encoding == Encoding.E4M3FN.number and target.arch >= 89
    return encoding == {"gfx942": Encoding.E4M3FNUZ.number, "gfx950": Encoding.E4M3FN.number}.get(target.arch)


@constexpr_function
def _is_half_sooner(encoding: int) -> bool:
    """True if codes become float16 by fewer instructions than bfloat16."""
    return encoding in (Encoding.E4M3FN.number, Encoding.E5M2.number) and on_nvidia()


@constexpr_function
def _type(encoding: int) -> tl.dtype:
    return _TYPES[encoding]


@triton.jit
def _scale_of_products(x, ENCODING: tl.constexpr, DTYPE: tl.constexpr, CODED_Q: tl.constexpr):
    """q or keys as factors of products: unchanged codes if both are codes and the target multiplies them."""
    if CODED_Q and _multiplies_codes(ENCODING):
        F8: tl.constexpr = _type(ENCODING)
        result = x.to(F8, bitcast=True)
    else:
        result = decoded(x, ENCODING, DTYPE)
    return result


@triton.jit
def _pooled(scores, seen, G: tl.constexpr):
    """Scores of keys [KEY_BLOCK, lines] -> of units; -inf if a line sees no key of a unit, NaN if one is NaN."""
    LINES: tl.constexpr = G.TOKENS * G.SET_COLUMNS
    UNITS: tl.constexpr = G.KEY_BLOCK // G.UNIT_KEYS
    of_unit = tl.reshape(scores, [UNITS, G.UNIT_KEYS, LINES])
    is_seen = tl.reshape(seen.to(tl.int32), [UNITS, G.UNIT_KEYS, LINES])
    num_seen = tl.sum(is_seen, 1)
    if G.MEAN:
        total = tl.sum(tl.where(is_seen > 0, of_unit, 0.0), 1)
        result = tl.div_rn(total, tl.maximum(num_seen, 1).to(tl.float32))
        result = tl.where(num_seen > 0, result, float("-inf"))
    else:
        largest = tl.max(tl.where(is_seen > 0, of_unit, float("-inf")), 1)
        # The maximum of NaN and a number is the number.
        num_nan = tl.sum(((is_seen > 0) & (of_unit != of_unit)).to(tl.int32), 1)
        result = tl.where(num_nan > 0, float("nan"), largest)
    return result


@triton.jit
def _score_key_blocks(scores, q, keys, columns, first_block, step, scale_value, G: tl.constexpr):
    """Writes the scores of every step-th key block from first_block on. q: [D_COLUMNS, COLUMNS]"""
    KEY_BLOCK: tl.constexpr = G.KEY_BLOCK
    LINES: tl.constexpr = G.TOKENS * G.SET_COLUMNS
    lane = tl.arange(0, KEY_BLOCK)
    d = tl.arange(0, G.D_COLUMNS)
    num_keys = tl.max(columns.num_keys, 0)
    # Page ids travel one block ahead of the loads that need them, clamped to the table (see attention/decode.py).
    next_page = tl.load(keys.pages + tl.minimum((first_block * KEY_BLOCK + lane) // G.PAGE_KEYS, keys.width - 1))
    for block in tl.range(first_block, tl.cdiv(num_keys, KEY_BLOCK), step, num_stages=G.STAGES):
        # key, page, offset: [KEY_BLOCK]; k: [KEY_BLOCK, D_COLUMNS]; products: [KEY_BLOCK, COLUMNS]
        key = block * KEY_BLOCK + lane
        page = next_page.to(tl.int64)
        next_page = tl.load(keys.pages + tl.minimum((key + step * KEY_BLOCK) // G.PAGE_KEYS, keys.width - 1))
        offset = (key % G.PAGE_KEYS).to(tl.int64)
        live = key < num_keys
        is_k = live[:, None]
        if G.D_COLUMNS > G.DIM:
            is_k = is_k & (d < G.DIM)[None, :]
        k = tl.load(keys.at + (page * keys.page + offset * keys.key)[:, None] + d[None, :], mask=is_k, other=0)
        k = _scale_of_products(k, G.ENCODING, q.dtype, G.CODED_Q)
        products = tl.dot(k, q, input_precision="ieee")
        if G.RECTIFIED:
            # A maximum would make NaN a 0.
            products = tl.where(products < 0.0, 0.0, products)
        if columns.weight is not None:
            products = products * columns.weight[None, :]
        if G.HEAD_COLUMNS * G.SET_COLUMNS > G.HEADS * G.SETS:
            products = tl.where(columns.is_head[None, :], products, 0.0)
        # summed: [KEY_BLOCK, lines]
        if LINES == 1:
            summed = tl.sum(products, 1)[:, None]
        else:
            summed = tl.sum(tl.reshape(products, [KEY_BLOCK, LINES, G.HEAD_COLUMNS]), 2)
        if G.TOKEN_SCALES:
            of_key = tl.load(keys.scale + page * G.PAGE_KEYS + offset, mask=live, other=0.0)
            summed = summed * (of_key * scale_value)[:, None]
        else:
            summed = summed * scale_value
        if G.UNIT_KEYS > 1:
            summed = _pooled(summed, key[:, None] < columns.num_keys[None, :], G)
        unit = block * (KEY_BLOCK // G.UNIT_KEYS) + tl.arange(0, KEY_BLOCK // G.UNIT_KEYS)
        is_unit = unit[:, None] < columns.num_units[None, :]
        tl.store(scores + columns.line[None, :] + unit[:, None], summed, mask=is_unit)


@triton.jit(do_not_specialize=["first_token", "end_token", "splits", "width"])
def _index_scores_kernel(
    q,
    weights,
    k_pages,
    k_scale,
    table,
    row_of_token,
    position_of_token,
    num_tokens,
    scores,
    scale,
    first_token,
    end_token,
    splits,
    width,
    q_token,
    q_head,
    w_token,
    w_head,
    k_page,
    k_key,
    table_row,
    scores_line,
    G: tl.constexpr,
):
    TOKENS: tl.constexpr = G.TOKENS
    TOKEN_COLUMNS: tl.constexpr = G.SET_COLUMNS * G.HEAD_COLUMNS
    block = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    block_token = first_token + block * TOKENS
    # token, index_set, head: of each column; q_block: [D_COLUMNS, COLUMNS]
    column = tl.arange(0, TOKENS * TOKEN_COLUMNS)
    token = block_token + column // TOKEN_COLUMNS
    index_set = column // G.HEAD_COLUMNS % G.SET_COLUMNS
    head = column % G.HEAD_COLUMNS
    is_head = (token < end_token) & (index_set < G.SETS) & (head < G.HEADS)
    # 64 bits before a stride is multiplied: heads may be farther apart than tokens.
    head = (index_set * G.HEADS + head).to(tl.int64)
    d = tl.arange(0, G.D_COLUMNS)
    q_at = q + token.to(tl.int64) * q_token + head * q_head
    q_block = tl.load(q_at[None, :] + d[:, None], mask=is_head[None, :] & (d < G.DIM)[:, None], other=0)
    scale_value = scale
    if G.CODED_Q:
        # Decoded if the target cannot multiply codes; float16 represents all of them.
        q_block = _scale_of_products(q_block, G.ENCODING, tl.float16, True)
    elif _is_half_sooner(G.ENCODING):
        q_block, q_scale_value = half_query(q_block)
        scale_value = scale_value * q_scale_value
    weight = None
    if weights is not None:
        weight = tl.load(weights + token.to(tl.int64) * w_token + head * w_head, mask=is_head, other=0.0)
    if k_scale is not None and not G.TOKEN_SCALES:
        scale_value = scale_value * tl.load(k_scale)
    # Lines: a token and a set each.
    line = tl.arange(0, TOKENS * G.SET_COLUMNS)
    line_token = block_token + line // G.SET_COLUMNS
    is_line = (line_token < end_token) & (line % G.SET_COLUMNS < G.SETS)
    line_at = ((line_token - first_token) * G.SETS + line % G.SET_COLUMNS).to(tl.int64) * scores_line
    visible = visible_tokens(position_of_token, num_tokens, line_token, is_line)
    line_row = tl.load(row_of_token + line_token, mask=is_line, other=-1)
    # Tokens of one sequence are adjacent: walk the keys of each sequence that the block has tokens of.
    done = 0
    while done < TOKENS:
        row = tl.load(row_of_token + tl.minimum(block_token + done, end_token - 1))
        is_after = line // G.SET_COLUMNS >= done
        others = tl.where(is_after & (line_row != row), line // G.SET_COLUMNS, TOKENS)
        end = tl.maximum(tl.min(others, 0), done + 1)
        is_mine = is_after & (line // G.SET_COLUMNS < end)
        seen = tl.where(is_mine, visible, 0)
        columns = Columns(
            weight,
            is_head,
            seen // G.KEY_TOKENS,
            candidate_units(seen, G.KEY_TOKENS * G.UNIT_KEYS, G.LAST_SCORED),
            line_at,
        )
        line_of_table = table + row.to(tl.int64) * table_row
        keys = Keys(k_pages, k_page, k_key, k_scale, line_of_table, width)
        _score_key_blocks(scores, q_block, keys, columns, split, splits, scale_value, G)
        done = end


def launch_index_scores(
    args: IndexArgs,
    scores: Tensor,
    *,
    indexing: Indexing,
    tiles: IndexTiles,
    programs: int,
    first_token: int = 0,
) -> None:
    """Writes scores of the candidates of tokens [first_token, first_token + n); the rest of a line stays unchanged.

    scores:   float32 [n, sets, stride], contiguous; stride is no less than any token's candidates
    programs: that the device holds at a time
    """
    args.check(indexing)
    num_tokens = scores.shape[0]
    assert scores.dtype == torch.float32
    assert scores.is_contiguous()
    assert scores.shape[1] == indexing.sets
    assert scores.shape[2] >= indexing.max_units(args.tokens.max_kv_len)
    assert first_token + num_tokens <= len(args.q)
    geometry = _geometry(args, indexing, tiles)
    blocks = triton.cdiv(num_tokens, geometry.TOKENS)
    key_blocks = triton.cdiv(args.tokens.max_kv_len // indexing.key_tokens, geometry.KEY_BLOCK)
    splits = index_splits(blocks, key_blocks, programs)
    keys, k_scale = args.pages
    launch(
        _index_scores_kernel,
        (blocks * splits,),
        _raw(args.q),
        args.weights,
        _raw(keys),
        k_scale,
        args.table,
        args.tokens.row_of_token,
        args.tokens.position_of_token,
        args.tokens.num_tokens,
        scores,
        indexing.scale,
        first_token,
        first_token + num_tokens,
        splits,
        args.table.shape[1],
        args.q.stride(0),
        args.q.stride(1),
        *((0, 0) if args.weights is None else args.weights.stride()),
        keys.stride(0),
        keys.stride(1),
        args.table.stride(0),
        scores.shape[2],
        G=geometry,
        num_warps=tiles.num_warps,
    )


def launch_select(
    args: IndexArgs, selection: SelectedKeys, workspace: Tensor, *, indexing: Indexing, tiles: IndexTiles, programs: int
) -> None:
    """Selects the units of every token: scores, then the best units, for as many tokens at a time as the scratch holds.

    selection: of indexing's sets and width; written whole
    workspace: float32, select_words(...) or longer; content is undefined
    programs:  of the indexer, that the device holds at a time
    """
    num_tokens, max_kv_len = len(args.q), args.tokens.max_kv_len
    assert workspace.dtype == torch.float32
    assert workspace.is_contiguous()
    assert workspace.numel() >= select_words(num_tokens, max_kv_len, indexing)
    cut = top_k_cut(indexing.max_units(max_kv_len), indexing)
    chunk = select_chunk(num_tokens, max_kv_len, indexing)
    for first in range(0, num_tokens, chunk):
        lines = min(chunk, num_tokens - first), indexing.sets
        score_words = lines[0] * lines[1] * cut.stride
        scores = workspace[:score_words].view(*lines, cut.stride)
        scratch = workspace[score_words:].view(torch.int32)
        launch_index_scores(args, scores, indexing=indexing, tiles=tiles, programs=programs, first_token=first)
        if args.among is not None:
            launch_leave_out(scores, args.tokens, args.among, indexing=indexing, first_token=first)
        launch_top_k(scores, scratch, args.tokens, selection, indexing=indexing, cut=cut, first_token=first)


def _geometry(args: IndexArgs, indexing: Indexing, tiles: IndexTiles) -> IndexGeometry:
    """Returns the values that the launch is compiled for."""
    keys, k_scale = args.pages
    heads, dim = args.q.shape[1] // indexing.sets, args.q.shape[2]
    set_columns = next_power_of_2(indexing.sets)
    # A matrix unit wants 16 columns.
    head_columns = max(next_power_of_2(heads), 16 // set_columns)
    tokens = max(tiles.columns // (set_columns * head_columns), 1)
    most_tokens = next_power_of_2(args.tokens.max_q_len + 1) // 2
    return IndexGeometry(
        DIM=dim,
        D_COLUMNS=max(next_power_of_2(dim), 32 if keys.dtype.itemsize == 1 else 16),
        ENCODING=Encoding.of(keys.dtype).number,
        CODED_Q=args.q.dtype.itemsize == 1,
        TOKEN_SCALES=k_scale is not None and k_scale.dim() == 2,
        PAGE_KEYS=keys.shape[1],
        KEY_BLOCK=max(tiles.key_block, indexing.unit_keys),
        TOKENS=max(min(tokens, most_tokens), 1),
        SETS=indexing.sets,
        SET_COLUMNS=set_columns,
        HEADS=heads,
        HEAD_COLUMNS=head_columns,
        KEY_TOKENS=indexing.key_tokens,
        UNIT_KEYS=indexing.unit_keys,
        RECTIFIED=indexing.rectified,
        MEAN=indexing.pooling is Pooling.MEAN,
        LAST_SCORED=indexing.last_unit is LastUnit.SCORED,
        STAGES=tiles.num_stages,
    )


def _raw(x: Tensor) -> Tensor:
    """Codes as memory: few operations know the dtypes of eight bits."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
