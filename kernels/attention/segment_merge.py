"""Merges the segments of every decoded row from left to right (segments.py), and writes out and LSE.

It works element by element, so the way that rows, heads and columns are shared out decides no bit.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import Softmax
from rocm_attn.kernels.attention.cuts import DecodeCut, RowCut
from rocm_attn.kernels.attention.decode_schedule import (
    PROGRAM_SHARE,
    SEQ_KV_LEN,
    SEQ_OFFSET,
    SEQ_PROGRAM,
    words_of_seq,
)
from rocm_attn.kernels.attention.merge import Parts
from rocm_attn.kernels.attention.segments import UNFUSED, merge_segment
from rocm_attn.kernels.attention.softmax import LN_2, add_sink, visible_blocks
from rocm_attn.kernels.early import early_options
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.tiles import next_power_of_2

# Parts of a row that are loaded before they are merged, one after the other.
_PARTS = 8
# The programs to have if rows are few: fewer leave an H200 idle, many more run one after the other.
_PROGRAMS = 2048


class SegmentMergeGeometry(NamedTuple):
    """The values that the merge is compiled for.

    rows:       how decode's rows are cut; their key blocks are segments
    V_HEAD_DIM: elements of an output row
    HEADS:      q rows of a program
    COLUMNS:    output columns of a program
    PARTS:      parts of a row that are loaded before they are merged, one after the other
    EARLY:      see launch_segment_merge
    """

    rows: RowCut
    V_HEAD_DIM: int
    HEADS: int
    COLUMNS: int
    PARTS: int
    EARLY: bool


@triton.jit(do_not_specialize=["num_programs", "window_left"])
def _segment_merge_kernel(
    q_indptr,
    schedule,
    parts,
    sums,
    out,
    lse,
    sinks,
    num_programs,
    window_left,
    out_token,
    out_head,
    lse_token,
    lse_head,
    G: tl.constexpr,
):
    R: tl.constexpr = G.rows
    HEADS: tl.constexpr = G.HEADS
    COLUMNS: tl.constexpr = G.COLUMNS
    PARTS: tl.constexpr = G.PARTS
    seq = tl.program_id(0) // R.ROWS
    row = tl.program_id(0) % R.ROWS
    seq_words = words_of_seq(schedule, num_programs, seq)
    kv_len = tl.load(seq_words + SEQ_KV_LEN)
    if G.EARLY:
        # Like in merge.py: the next launch may start when every program has ended, and must find decode ended too.
        gdc_launch_dependents()
        gdc_wait()
    if kv_len >= 0:
        _, _, num_parts = visible_blocks(kv_len, window_left, R.KEY_BLOCK, R.WINDOWED)
        seq_start = tl.load(seq_words + SEQ_PROGRAM).to(tl.int64) * tl.load(schedule + PROGRAM_SHARE)
        seq_start += tl.load(seq_words + SEQ_OFFSET)
        first_part = seq_start + row * (num_parts + R.ROW_COST) + R.ROW_COST
        q_row = tl.program_id(1) * G.HEADS + tl.arange(0, G.HEADS)
        column = tl.program_id(2) * G.COLUMNS + tl.arange(0, G.COLUMNS)
        # The last block of a KV head's query heads may be shorter.
        head_block = row % R.HEAD_BLOCKS
        num_q_rows = tl.minimum(R.Q_ROWS, R.GQA_RATIO - head_block * R.Q_ROWS)
        is_row = q_row < num_q_rows
        is_column = (column < G.V_HEAD_DIM)[None, :]
        maximum = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, COLUMNS], tl.float32)
        for first in range(0, num_parts, PARTS):
            for part in tl.static_range(PARTS):
                # part_maximum, part_total: [HEADS]; part_acc: [HEADS, COLUMNS]
                is_part = q_row < tl.where(first + part < num_parts, num_q_rows, 0)
                line = (first_part + first + part) * R.Q_ROWS + q_row
                part_maximum = tl.load(sums + line * 2, mask=is_part, other=float("-inf"))
                part_total = tl.load(sums + line * 2 + 1, mask=is_part, other=0.0)
                block = parts + line[:, None] * G.V_HEAD_DIM + column[None, :]
                part_acc = tl.load(block, mask=is_part[:, None] & is_column, other=0.0)
                merged = merge_segment(Softmax((acc,), maximum, total), Softmax((part_acc,), part_maximum, part_total))
                acc, maximum, total = merged.acc[0], merged.maximum, merged.total
        token = tl.load(q_indptr + seq).to(tl.int64)
        head = (row // R.HEAD_BLOCKS * R.GQA_RATIO + head_block * R.Q_ROWS + q_row).to(tl.int64)
        if sinks is not None:
            sink = tl.load(sinks + head, mask=is_row, other=float("-inf"))
            maximum, total, decay = add_sink(maximum, total, sink)
            acc = acc * decay[:, None]
        # A sequence of length 0 has seen no key: 0 / 1, and LSE -inf + log2(1).
        total = tl.where(total == 0.0, 1.0, total)
        value = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(
            out + token * out_token + head[:, None] * out_head + column[None, :],
            value,
            mask=is_row[:, None] & is_column,
        )
        if lse is not None:
            # Programs of other column chunks store the same number.
            tl.store(lse + token * lse_token + head * lse_head, (maximum + tl.log2(total)) * LN_2, mask=is_row)


def segment_memory(args: AttendArgs, cut: DecodeCut, rows: RowCut, most_segments: int) -> Parts:
    """Cuts the workspace of decode: float32 [slots, q_rows, v_head_dim] and [slots, q_rows, 2], flat.

    most_segments: of a sequence, see SegmentTiles
    """
    sum_words, part_words = cut.segment_words(
        args.queries.num_seqs, most_segments, q_rows=rows.Q_ROWS, v_head_dim=args.out.shape[2]
    )
    args.check_workspace(sum_words + part_words)
    return Parts(args.workspace[sum_words : sum_words + part_words], args.workspace[:sum_words])


def launch_segment_merge(args: AttendArgs, memory: Parts, *, cut: DecodeCut, rows: RowCut, early: bool = False) -> None:
    """Writes out and lse of every sequence with one new token; the arguments are launch_segment_decode's.

    early: see launch_merge
    """
    v_head_dim = args.out.shape[2]
    # Few rows need many programs; with many rows a program takes as many heads as its registers hold.
    num_rows, block = args.queries.num_seqs * rows.ROWS, max(16, next_power_of_2(v_head_dim))
    is_small = num_rows <= 64
    heads = 1 if is_small else min(next_power_of_2(rows.Q_ROWS), max(1, 512 // block))
    columns = min(block, 32) if is_small else block
    if is_small and early:  # on the GPUs that were measured
        columns = min(block, 256, max(32, next_power_of_2(num_rows * rows.Q_ROWS * block // _PROGRAMS)))
    launch(
        _segment_merge_kernel,
        (num_rows, triton.cdiv(rows.Q_ROWS, heads), triton.cdiv(v_head_dim, columns)),
        args.queries.q_indptr,
        args.schedule,
        *memory,
        args.out,
        args.lse,
        args.sinks,
        cut.programs,
        cut.window_left,
        *args.written_strides,
        G=SegmentMergeGeometry(rows, v_head_dim, heads, columns, _PARTS, early),
        num_warps=1,
        **early_options(early),
        **UNFUSED,
    )
