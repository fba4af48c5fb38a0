"""Attention over a selection of latents for Hopper, in Gluon: sparse/attention.py's results by the warp groups of
latent_groups.py.

A program has 64 rows, query heads of a token, and walks parts of tokens' selections: the latents of the next token
arrive while results are written. Programs with other heads of the same tokens are neighbours, and walk side by side.
Parts are merged by sparse/merge_parts.py.

Latents that a token does not see may be NaN: zeros are written instead of them. Records (cache/records.py) are decoded
on the way to shared memory (gather_records.py).
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from rocm_attn.kernels.attention.bundles import HeadRows
from rocm_attn.kernels.attention.scores import LOG2_E
from rocm_attn.kernels.cache.codes import is_record
from rocm_attn.kernels.cache.records import RecordParts
from rocm_attn.kernels.hopper.gather_records import RECORD_BYTES, gather_records
from rocm_attn.kernels.hopper.latent_groups import (
    LatentOutputs,
    Latents,
    gather,
    new_shared,
    run_groups,
)
from rocm_attn.kernels.hopper.rings import GATHERING_THREADS
from rocm_attn.kernels.hopper.selected_rows import HopperSelectedGeometry, ListedTokens, parts_of_program
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.sparse.arguments import SelectedArgs
from rocm_attn.kernels.sparse.attention import parts_and_sums, selected_geometry
from rocm_attn.kernels.sparse.cuts import selected_cut
from rocm_attn.kernels.sparse.merge_parts import launch_merge_parts
from rocm_attn.kernels.tuning.latent_tiles import HopperLatentTiles


@gluon.jit(do_not_specialize=["num_items", "num_programs", "width"])
def _hopper_selected_kernel(
    q,
    pages,
    record_scales,
    record_rest,
    table,
    row_of_token,
    position_of_token,
    num_tokens,
    units,
    counts,
    out,
    lse,
    parts,
    sums,
    qk_scale,
    num_items,
    num_programs,
    width,
    q_token,
    q_head,
    table_row,
    out_token,
    out_head,
    lse_token,
    lse_head,
    G: gl.constexpr,
):
    step = ListedTokens(position_of_token, num_tokens, units, counts, num_programs // G.HEAD_BLOCKS)
    todo = parts_of_program(num_items, num_programs, G)
    shared = new_shared(q.dtype.element_ty, 1 if is_record(G.rows.coding.SCALES) else GATHERING_THREADS, G)
    fence_async_shared()
    gl.thread_barrier()
    q_rows, out_rows, lse_rows = (
        HeadRows(q, q_token, q_head),
        HeadRows(out, out_token, out_head),
        HeadRows(lse, lse_token, lse_head),
    )
    to = LatentOutputs(q_rows, out_rows, lse_rows, parts, sums, qk_scale)
    if is_record(G.rows.coding.SCALES):
        record = RecordParts(pages, record_scales, record_rest)
        latents = Latents(pages, record, table, table_row, width, row_of_token)
        run_groups(gather_records, latents, step, shared, to, todo, G)
    else:
        latents = Latents(pages, None, table, table_row, width, row_of_token)
        run_groups(gather, latents, step, shared, to, todo, G)


def launch_hopper_selected(args: SelectedArgs, *, scale: float, tiles: HopperLatentTiles, programs: int) -> None:
    """Like `launch_selected_attention`, without sinks, over contiguous rows of 512 + 64 elements, or their records.

    Raises ValueError for pages that the kernel does not read.
    """
    selection, tokens, pages = args.selection, args.tokens, args.pages
    of_cut = tiles.latent
    cut = selected_cut(
        len(args.q), selection.width * selection.unit_tokens, heads=args.heads, tiles=of_cut, programs=programs
    )
    rows = selected_geometry(args, cut, of_cut.query_rows, of_cut.key_block, of_cut.num_stages)
    assert args.sinks is None, "the limits refuse sinks"
    assert pages.record is None or (pages.format.k_row, args.q.dtype) == (RECORD_BYTES.value, torch.bfloat16)
    assert pages.raw_k.is_contiguous(), "the limits refuse other pages"
    assert pages.has_aligned_sides, "the limits refuse pages that begin elsewhere"
    geometry = HopperSelectedGeometry(
        rows, cut, selection.units is not None, tiles.value_registers, tiles.score_registers, tiles.loader_registers
    )
    parts, sums = parts_and_sums(args, cut)
    num_items = len(args.q) * cut.parts
    groups = min(num_items, max(1, programs // rows.HEAD_BLOCKS))
    launch(
        _hopper_selected_kernel,
        (groups * rows.HEAD_BLOCKS,),
        args.q,
        pages.raw_k,
        *((None, None) if pages.record is None else pages.record[1:]),
        args.table,
        tokens.row_of_token,
        tokens.position_of_token,
        tokens.num_tokens,
        selection.units,
        selection.counts,
        args.out,
        args.lse,
        parts,
        sums,
        scale * LOG2_E,
        num_items,
        groups * rows.HEAD_BLOCKS,
        args.table.shape[1],
        args.q.stride(0),
        args.q.stride(1),
        args.table.stride(0),
        *args.written_strides,
        G=geometry,
        num_warps=of_cut.num_warps,
    )
    if cut.parts > 1:
        launch_merge_parts(args, cut, parts, sums, rows)
