"""Attention over a selection for CDNA, in Gluon: sparse/attention.py's results for latent rows of 512 + 64 elements, or
records of them.

    out[token, head] = softmax(scale * q[token, head] . (c | r)^T) c       c | r: of the listed keys that the token sees

A program is four waves, and has a part of a token's selection for up to 64 of its heads. It looks up the slots of all
listed keys first, and writes them to LDS; then it is latent decode (latent.py), whose waves read slots there in place
of pages. An entry that stands for no key has the slot of another one, and a score of -inf. If a token has more heads
than a program holds, programs take a block of them each. They run next to each other on one die, since launches go to
dies in turn: its L2 cache has the rows of the first one for the others.
"""

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rocm_attn.kernels.attention.bundles import HeadRows, RowOutputs
from rocm_attn.kernels.attention.cuts import RowCut
from rocm_attn.kernels.attention.scores import LOG2_E
from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.cdna.latent import store_nothing, store_row
from rocm_attn.kernels.cdna.latent_blocks import (
    KEYS,
    REST,
    V_DIM,
    WAVES,
    CdnaLatentGeometry,
    ListedLine,
    attend_latent_blocks,
    load_query,
)
from rocm_attn.kernels.cdna.latent_heads import allocate, attend_heads, load_queries, store_heads
from rocm_attn.kernels.cdna.latent_layouts import shares_rows
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.sparse.arguments import SelectedArgs, SelectedKeys
from rocm_attn.kernels.sparse.attention import parts_and_sums, selected_geometry
from rocm_attn.kernels.sparse.cuts import selected_cut
from rocm_attn.kernels.sparse.merge_parts import launch_merge_parts
from rocm_attn.kernels.sparse.places import visible_tokens
from rocm_attn.kernels.sparse.rows import heads_of_row, listed_keys
from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_CODES, EXTEND_UNITS
from rocm_attn.kernels.tuning.latent_tiles import SelectedTiles
from rocm_attn.kernels.tuning.sparse_tiles import CDNA_MOST_KEYS
from rocm_attn.kernels.tuning.tiles import next_power_of_2

# Dies of MI300X and MI355X.
_DIES = gl.constexpr(8)
# Numbers of a list in LDS, block by block.
_BLOCKS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _list_keys(slots, bias, units, line, width, first, end, visible, page_slots, G: gl.constexpr):
    """Writes the slots and the bias of the entries [first, end) of a selection to LDS, as ListedLine has them.

    Returns the largest slot, -1 if the token sees none of them.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 64], [WAVES, 1], [1, 0])
    block = gl.arange(0, slots.shape[0], layout=gl.SliceLayout(1, L))[:, None]
    key = first + block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, L))[None, :]
    unit = gl.load(units + key, mask=key < end, other=-1)
    is_seen = (unit >= 0) & (unit < visible)
    position = gl.where(is_seen, unit, 0)
    # Slots have 31 bits (LayerPages.page_slots).
    page = gl.load(line + gl.minimum(position // G.PAGE_SIZE, width - 1), mask=is_seen, other=0)
    slot = gl.where(is_seen, page * page_slots + position % G.PAGE_SIZE, -1)
    largest = gl.max(gl.max(slot, 1), 0)
    # Another key's row has numbers, which may be multiplied by a weight of 0.
    whole: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    slots = slots.reinterpret(gl.int32, slots.shape, whole)
    bias = bias.reinterpret(gl.bfloat16, bias.shape, whole)
    slots.store(gl.where(is_seen, slot, gl.maximum(largest, 0)))
    bias.store(gl.where(is_seen, 0.0, float("-inf")).to(gl.bfloat16))
    return largest


@gluon.jit(do_not_specialize=["num_works", "num_parts", "part_keys", "width", "page_slots"])
def _cdna_selected_kernel(
    q,
    pages,
    table: tl.const,
    row_of_token: tl.const,
    position_of_token: tl.const,
    num_tokens: tl.const,
    units: tl.const,
    counts: tl.const,
    out,
    lse,
    sinks,
    parts,
    sums,
    qk_scale,
    num_works,
    num_parts,
    part_keys,
    width,
    page_slots,
    q_token,
    q_head,
    p_token,
    table_row,
    out_token,
    out_head,
    lse_token,
    lse_head,
    G: gl.constexpr,
    S: gl.constexpr,
    MOST_BLOCKS: gl.constexpr,
):
    launched = gl.program_id(0)
    row = launched // _DIES % S.ROWS
    work = launched // (_DIES * S.ROWS) * _DIES + launched % _DIES
    part = work % num_parts if S.IS_CUT else 0
    token = (work // num_parts if S.IS_CUT else work).to(gl.int64)
    if work < num_works:
        kv_head, first_head, num_heads = heads_of_row(row, S)
        num_keys, selection = listed_keys(counts, token, kv_head, S)
        first = part * part_keys
        # If a row has several parts, the merge knows which ones have keys.
        if (not S.IS_CUT) | (first < num_keys):
            slots = gl.allocate_shared_memory(gl.int32, [MOST_BLOCKS, KEYS], _BLOCKS)
            bias = gl.allocate_shared_memory(gl.bfloat16, [MOST_BLOCKS, KEYS], _BLOCKS)
            if shares_rows(G):
                lds = allocate(q.dtype.element_ty, G)
            end = gl.minimum(first + part_keys, num_keys) if S.IS_CUT else num_keys
            visible = visible_tokens(position_of_token, num_tokens, token.to(gl.int32), True)
            line = table + gl.load(row_of_token + token).to(gl.int64) * table_row
            listed = units + selection * S.WIDTH
            is_empty = _list_keys(slots, bias, listed, line, width, first, end, visible, page_slots, G) < 0
            # Without a key no block is added up: page 0 may hold anything.
            end_block = gl.where(is_empty, 0, (end - first + KEYS - 1) // KEYS)
            BYTES: gl.constexpr = pages.dtype.element_ty.primitive_bitwidth // 8
            rows = ListedLine(
                pages.to(gl.pointer_type(gl.int8)), p_token * BYTES, slots, bias, gl.maximum(end_block - 1, 0)
            )
            of_row = HeadRows(q + token * q_token + first_head * q_head, q_token, q_head)
            to_lse = None
            if lse is not None:
                to_lse = HeadRows(lse + first_head * lse_head, lse_token, lse_head)
            of_heads = sinks + first_head if sinks is not None else None
            to = RowOutputs(HeadRows(out + first_head * out_head, out_token, out_head), to_lse, parts, sums, of_heads)
            line_of_part = (token * S.ROWS + row) * num_parts + part
            if (not S.IS_CUT) & is_empty:
                store_nothing(to, token, 0, num_heads, G)
            elif shares_rows(G):
                queries = load_queries(lds, of_row, num_heads, G)
                DTYPE: gl.constexpr = q.dtype.element_ty
                state = attend_heads(lds, queries, rows, 0, end_block, end_block * KEYS, qk_scale, DTYPE, G)
                store_heads(lds, state, to, token, 0, num_heads, line_of_part, not S.IS_CUT, G)
            else:
                query = (load_query(of_row, 0, V_DIM, G), load_query(of_row, V_DIM, REST, G))
                state = attend_latent_blocks(query, rows, 0, end_block, end_block * KEYS, qk_scale, G)
                store_row(state, to, token, line_of_part, not S.IS_CUT, G)


def launch_cdna_selected(args: SelectedArgs, *, arch: str, scale: float, tiles: SelectedTiles, programs: int) -> None:
    """Like `launch_selected_attention`, but over rows of 512 + 64 elements in q's dtype, 16 bits, at equal distances,
    selections of up to CDNA_MOST_KEYS tokens. Or over records of Scales.GROUP, in the codes that the
    arch's hardware reads, with q in bfloat16.

    arch:  one of cdna_tiles.EXTEND_ARCHS
    tiles: of cdna_selected_tiles
    """
    pages, tokens, selection = args.pages, args.tokens, args.selection
    cut = selected_cut(len(args.q), selection.width, heads=args.heads, tiles=tiles, programs=programs)
    listed = selected_geometry(args, cut, tiles.query_rows, tiles.key_block, tiles.num_stages)
    assert (args.q.shape[2], args.out.shape[2]) == (V_DIM.value + REST.value, V_DIM.value), "the limits refuse others"
    if pages.record is None:
        assert pages.format.encoding.dtype == args.q.dtype, "the limits refuse codes"
        assert args.q.itemsize == 2, "the limits refuse other elements"
    else:
        assert pages.format.encoding is EXTEND_CODES[arch], "the entry refuses other codes"
        assert pages.format.scales is Scales.GROUP, "the limits refuse other records"
        assert args.q.dtype == torch.bfloat16, "the limits refuse other queries"
    assert isinstance(selection, SelectedKeys), "a selection is listed"
    assert selection.unit_tokens == 1, "the entry refuses other units"
    assert selection.width <= CDNA_MOST_KEYS, "the entry refuses more keys"
    assert pages.page_slots, "rows are read by slots"
    row_bytes = pages.raw_k.stride(1) * pages.raw_k.itemsize
    assert pages.raw_k.data_ptr() % 4 == 0 == row_bytes % 4, "words of 4 bytes are read"
    geometry = CdnaLatentGeometry(
        rows=RowCut(
            ROWS=1,
            GQA_RATIO=cut.row_heads,
            HEADS_PER_ROW=1,
            HEAD_BLOCKS=1,
            BLOCK_HEADS=cut.row_heads,
            Q_ROWS=cut.row_heads,
            KEY_BLOCK=KEYS.value,
            ROW_COST=0,
            WINDOWED=False,
        ),
        HEADS=tiles.query_rows,
        HEAD_BLOCKS=cut.rows,
        PAGE_SIZE=pages.format.page_size,
        BLOCKS=tiles.num_stages,
        UNITS=EXTEND_UNITS[arch],
        CODING=pages.coding,
        V_IN_LDS=False,
        LISTED=True,
    )
    parts, sums = parts_and_sums(args, cut)
    num_works = len(args.q) * cut.parts
    launch(
        _cdna_selected_kernel,
        (-(-num_works // _DIES.value) * _DIES.value * cut.rows,),
        args.q,
        pages.raw_k,
        args.table,
        tokens.row_of_token,
        tokens.position_of_token,
        tokens.num_tokens,
        selection.units,
        selection.counts,
        args.out,
        args.lse,
        args.sinks,
        parts,
        sums,
        scale * LOG2_E,
        num_works,
        cut.parts,
        cut.part_keys,
        args.table.shape[1],
        pages.page_slots,
        args.q.stride(0),
        args.q.stride(1),
        pages.raw_k.stride(1),
        args.table.stride(0),
        *args.written_strides,
        G=geometry,
        S=listed,
        MOST_BLOCKS=next_power_of_2(cut.part_keys // KEYS.value),
        num_warps=WAVES.value,
    )
    if cut.parts > 1:
        launch_merge_parts(args, cut, parts, sums, listed)
