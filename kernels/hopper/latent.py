"""Decode over latent pages for Hopper, in Gluon: latent/decode.py's results by warp groups that each have one task.

    out[token, head] = softmax(scores of q[token, head] . (c | r)^T) c       c | r: rows that the token sees

A program has 64 rows, a new token and a query head each, and four warp groups (latent_groups.py). A row of the schedule
is some new tokens of a sequence. If a token has more query heads than a program has rows, neighbouring programs take a
block of the heads each and walk the same keys side by side. Rows that several programs share are merged as in
attention/decode.py.

Latents that no row sees may be NaN: zeros are written instead of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import HeadRows
from rocm_attn.kernels.attention.cuts import DecodeCut
from rocm_attn.kernels.attention.merge import launch_merge
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.early import early_options, wait_for_launch
from rocm_attn.kernels.hopper.latent_groups import (
    V_DIM,
    LatentOutputs,
    Latents,
    gather,
    new_shared,
    run_groups,
)
from rocm_attn.kernels.hopper.latent_rows import HopperLatentGeometry, ScheduledRows, work_of_program
from rocm_attn.kernels.hopper.rings import GATHERING_THREADS
from rocm_attn.kernels.hopper.rows import GROUP_ROWS
from rocm_attn.kernels.latent.cuts import latent_partials_words, latent_row_cut
from rocm_attn.kernels.latent.limits import check_plain_latents
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.latent_tiles import HopperLatentTiles


@gluon.jit(do_not_specialize=["num_programs", "width"])
def _hopper_latent_kernel(
    q,
    pages,
    table,
    row_of_seq,
    q_indptr,
    schedule,
    partials,
    out,
    lse,
    qk_scale,
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
    # Like in decode.py: the launch before this one may write what is read.
    wait_for_launch(G.EARLY)
    step = ScheduledRows(schedule, num_programs, q_indptr)
    todo = work_of_program(step, G)
    if todo.work > 0:
        shared = new_shared(q.dtype.element_ty, GATHERING_THREADS, G)
        fence_async_shared()
        gl.thread_barrier()
        latents = Latents(pages, None, table, table_row, width, row_of_seq)
        q_rows, out_rows, lse_rows = (
            HeadRows(q, q_token, q_head),
            HeadRows(out, out_token, out_head),
            HeadRows(lse, lse_token, lse_head),
        )
        sums = partials + num_programs * (2 * G.rows.Q_ROWS * V_DIM)
        to = LatentOutputs(q_rows, out_rows, lse_rows, partials, sums, qk_scale)
        run_groups(gather, latents, step, shared, to, todo, G)


def launch_hopper_latent_decode(args: AttendArgs, *, scores: Scores, cut: DecodeCut, tiles: HopperLatentTiles) -> None:
    """Like `launch_latent_decode`, but without windows, caps, sinks, masks, over contiguous rows of 512 + 64 elements.

    Raises ValueError for heads, dims, pages or dtypes that the kernel does not serve.
    """
    geometry = _geometry(args, scores, cut, tiles)
    queries, table = args.queries, args.table
    launch(
        _hopper_latent_kernel,
        (cut.programs * geometry.HEAD_BLOCKS,),
        args.q,
        args.pages.raw_k,
        table,
        queries.row_of_seq,
        queries.q_indptr,
        args.schedule,
        args.workspace,
        args.out,
        args.lse,
        scores.base_2_scale,
        cut.programs,
        table.shape[1],
        args.q.stride(0),
        args.q.stride(1),
        table.stride(0),
        *args.written_strides,
        G=geometry,
        num_warps=tiles.latent.num_warps,
        **early_options(geometry.EARLY),
    )
    launch_merge(args, cut, geometry.rows, early=geometry.EARLY)


def _geometry(args: AttendArgs, scores: Scores, cut: DecodeCut, tiles: HopperLatentTiles) -> HopperLatentGeometry:
    """Checks the arguments and returns the values that the launch is compiled for."""
    check_plain_latents(args, scores, "latent decode on Hopper")
    num_heads, latent = args.q.shape[1], tiles.latent
    assert args.pages.raw_k.is_contiguous(), "the limits refuse other pages"
    assert args.pages.has_aligned_sides, "the limits refuse pages that begin elsewhere"
    cut.check(args.schedule, args.queries.num_seqs)
    assert cut.key_block == latent.key_block, "the schedule was cut for other tiles"
    assert latent.query_rows == GROUP_ROWS.value, "a program has the rows of a warp group"
    assert latent.tokens_per_block(num_heads) >= cut.tokens.OF_ROW, "the schedule was cut for other tiles"
    args.check_workspace(latent_partials_words(cut, num_heads=num_heads, v_head_dim=V_DIM.value))
    return HopperLatentGeometry(
        rows=latent_row_cut(cut, num_heads),
        BLOCK_HEADS=latent.block_heads(num_heads),
        HEAD_BLOCKS=latent.head_blocks(num_heads),
        PAGE_SIZE=args.pages.format.page_size,
        KEY_BLOCK=latent.key_block,
        STAGES=latent.num_stages,
        CAUSAL=scores.visibility.causal,
        EARLY=latent.early,
        VALUE_REGISTERS=tiles.value_registers,
        SCORE_REGISTERS=tiles.score_registers,
        LOADER_REGISTERS=tiles.loader_registers,
    )
