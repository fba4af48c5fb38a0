"""Deterministic extend: paged attention of sequences with several new tokens, each with the bits that decode gives it.

A program walks its query block over all segments that the block sees and merges them from left to right (segments.py).
So it holds two accumulators: the segment's, and that of everything left of it. The longest rows may be shared out by
whole segments (extend_schedule.py): programs take the shares by a launch of their own, and segment_parts.py merges the
parts that they keep.
"""

from collections.abc import Mapping

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.cuts import ExtendCut
from rocm_attn.kernels.attention.extend import block_geometry, row_arguments, segment_extend_kernel
from rocm_attn.kernels.attention.mask_bits import TWO_WORDS
from rocm_attn.kernels.attention.query_block import BlockGeometry
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.segment_parts import launch_merge_of_segments
from rocm_attn.kernels.attention.segments import UNFUSED
from rocm_attn.kernels.attention.visible_keys import VisibleKeys
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles


def launch_segment_extend(
    args: AttendArgs, *, scores: Scores, cut: ExtendCut, tiles: SegmentTiles, mask: VisibleKeys | None = None
) -> None:
    """Like `launch_paged_extend`, but with the same bits in any batch and chunk, and in launch_segment_decode.

    args: with cut's schedule, and a workspace of tiles.extend_words(...) or longer
    cut:  of tiles.extend. If rows are shared out, it is by whole segments, and blocks of query heads are equal
    mask: as for launch_paged_extend

    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    args.check("deterministic extend")
    geometry = _geometry(args, scores, cut, tiles, mask)

    def launch_rows(grid: int, geometry: BlockGeometry, options: Mapping[str, int]) -> None:
        """Launches the shares or the whole rows, as the geometry says."""
        workspace = args.workspace if geometry.SHARES or tiles.left_in_memory else None
        given = row_arguments(args, workspace, scores, cut, mask, geometry.STRIDE_UNIT)
        options = {"num_warps": tiles.extend.num_warps, **options, **tiles.options(), **UNFUSED}
        launch(segment_extend_kernel, (grid,), *given, G=geometry, **options)

    programs = cut.sharing.programs
    if programs:
        launch_rows(programs, geometry._replace(SHARES=True, WHOLE_ROWS=False), {})
        launch_merge_of_segments(args, cut, extend=tiles.extend, segment_len=tiles.segment_len, slots=geometry.SLOTS)
    rows = cut.max_blocks(args.queries.num_tokens, args.queries.num_seqs) * geometry.KV_HEADS * geometry.HEAD_BLOCKS
    # The compiler options in addition to the warps are for whole rows.
    launch_rows(rows, geometry, tiles.extend.options())


def _geometry(
    args: AttendArgs, scores: Scores, cut: ExtendCut, tiles: SegmentTiles, mask: VisibleKeys | None
) -> BlockGeometry:
    """Checks the schedule and returns the values that the launch is compiled for."""
    extend, sharing = tiles.extend, cut.sharing
    num_kv_heads, gqa_ratio = args.heads
    geometry = block_geometry(args, scores, cut, extend, mask, exact=True)
    assert mask is None or extend.key_block <= TWO_WORDS
    if sharing.programs:
        assert sharing.segment_len == tiles.segment_len, "the schedule was cut for other segments"
        assert not tiles.left_in_memory, "programs that share merge in registers"
        assert mask is None, "a window that is counted from a draft's depth begins before what a row costs"
        assert extend.has_equal_blocks(gqa_ratio), "the merge finds heads by the place of a block"
        assert sharing.most_keys <= tiles.shared_segments * tiles.segment_len, "there is no room for all segments"
    args.check_workspace(
        tiles.extend_words(
            cut.max_blocks(args.queries.num_tokens, args.queries.num_seqs),
            programs=sharing.programs,
            num_kv_heads=num_kv_heads,
            gqa_ratio=gqa_ratio,
            v_head_dim=args.out.shape[2],
        )
    )
    return geometry._replace(SEGMENT_LEN=tiles.segment_len, SLOTS=tiles.segment_slots)
