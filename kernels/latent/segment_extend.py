"""Deterministic extend over latent pages, with the bits of deterministic decode for each token."""

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.cuts import ExtendCut
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.segments import UNFUSED
from rocm_attn.kernels.attention.visible_keys import VisibleKeys
from rocm_attn.kernels.latent.extend import check_rows, latent_segment_extend_kernel, row_arguments
from rocm_attn.kernels.latent.key_loop import latent_block_geometry
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.latent_tiles import LatentSegmentTiles


def launch_latent_segment_extend(
    args: AttendArgs, *, scores: Scores, cut: ExtendCut, tiles: LatentSegmentTiles, mask: VisibleKeys | None = None
) -> None:
    """Does the same as `launch_latent_extend`, with the same bits in any batch and chunk, and in deterministic decode.

    args: with cut's schedule; there is no workspace; pages are latent
    cut:  of latent_extend_cut, for tiles.block
    mask: which keys each token sees, instead of scores.visibility. A token that sees none receives 0 and LSE -inf

    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    queries, block = args.queries, tiles.block
    check_rows(args, scores, cut, block, mask, "deterministic latent extend")
    causal = scores.visibility.causal and mask is None
    geometry = latent_block_geometry(
        args, scores, block, causal=causal, segment_len=tiles.segment_len, by_pairs=tiles.by_pairs
    )
    launch(
        latent_segment_extend_kernel,
        (cut.max_blocks(queries.num_tokens, queries.num_seqs) * geometry.HEAD_BLOCKS,),
        *row_arguments(args, scores, mask),
        G=geometry,
        num_warps=block.num_warps,
        **tiles.options(),
        **UNFUSED,
    )
