"""The deterministic kernels on the problems of attention_cases.py, and a step's last tokens as separate decodes."""

from dataclasses import replace

import torch

from rocm_attn.kernels.attention.cuts import WHOLE_ROWS, DecodeCut, RowSharing
from rocm_attn.kernels.attention.extend_schedule import BLOCK_WORDS, SHARE_CUT
from rocm_attn.kernels.attention.segment_decode import launch_segment_decode
from rocm_attn.kernels.attention.segment_extend import launch_segment_extend
from rocm_attn.kernels.refs import segments as twins
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles
from tests.amd.kernels.attention_cases import ALL_SHARED, UNTOUCHED, Put, Tensors, as_it_is, extend_cut


def run_decode(tensors: Tensors, *, num_programs: int, tiles: SegmentTiles, put: Put = as_it_is) -> None:
    """Runs schedule, decode and merge, with scratch memory that is NaN or garbage before."""
    case, ratio = tensors.case, tensors.gqa_ratio
    cut = DecodeCut.of(
        tiles.decode(ratio),
        num_kv_heads=case.heads[1],
        programs=num_programs,
        window_left=case.window_left,
        has_slots=True,
    )
    most = tiles.most_segments(max(case.kv_len), case.window_left)
    words = sum(
        cut.segment_words(tensors.num_seqs, most, q_rows=tiles.decode(ratio).q_rows(ratio), v_head_dim=case.dims[1])
    )
    args = tensors.decode_args(cut, words, put)
    launch_segment_decode(args, scores=tensors.scores, most_segments=most, cut=cut, tiles=tiles)


def run_extend(
    tensors: Tensors,
    *,
    min_q_len: int = 1,
    tiles: SegmentTiles,
    sharing: RowSharing = WHOLE_ROWS,
    put: Put = as_it_is,
) -> int:
    """Runs schedule and extend, with scratch memory that is NaN or garbage before. Returns the number of shared query
    blocks.

    sharing: rows, causality and window are replaced by those of the tensors
    """
    case = tensors.case
    cut = extend_cut(tensors, tiles.extend, sharing, min_q_len=min_q_len)
    words = tiles.extend_words(
        cut.max_blocks(tensors.q.shape[0], tensors.num_seqs),
        programs=sharing.programs,
        num_kv_heads=case.heads[1],
        gqa_ratio=tensors.gqa_ratio,
        v_head_dim=case.dims[1],
    )
    args = tensors.extend_args(cut, words, put)
    launch_segment_extend(args, scores=tensors.scores, cut=cut, tiles=tiles, mask=tensors.mask)
    first_share = cut.max_blocks(tensors.q.shape[0], tensors.num_seqs) * BLOCK_WORDS.value
    return int(args.schedule[first_share + SHARE_CUT.value]) if sharing.programs else 0


def all_shared(tiles: SegmentTiles, programs: int) -> RowSharing:
    """Returns a sharing of every row by whole segments, in which a share may begin anywhere."""
    most_keys = tiles.shared_segments * tiles.segment_len
    return ALL_SHARED._replace(programs=programs, most_keys=most_keys, segment_len=tiles.segment_len)


def run_extend_twin(tensors: Tensors) -> None:
    """Runs the torch twin of run_extend; it has no min_q_len."""
    twins.segment_extend(tensors.args(), scores=tensors.scores, mask=tensors.mask)


def last_tokens(tensors: Tensors) -> Tensors:
    """Returns the last token of each sequence, all of which have new ones, as a decode step over the same pages."""
    assert all(tensors.case.q_len)
    last = (tensors.q_indptr[1:] - 1).long()
    num_seqs, device = tensors.num_seqs, tensors.q.device
    return replace(
        tensors,
        case=replace(tensors.case.decodes(), tail=0),
        q=tensors.q[last],
        q_len=torch.ones(num_seqs, dtype=torch.int32, device=device),
        q_indptr=torch.arange(num_seqs + 1, dtype=torch.int32, device=device),
        out=torch.full_like(tensors.out[last], UNTOUCHED),
        lse=torch.full_like(tensors.lse[last], UNTOUCHED),
        reference=tensors.reference[last],
        reference_lse=tensors.reference_lse[last],
    )


def assert_same_bits(decoded: Tensors, extended: Tensors) -> None:
    """Checks that a decode of last tokens equals extend's results for them."""
    last = (extended.q_indptr[1:] - 1).long()
    assert torch.equal(decoded.out, extended.out[last]), "decode and extend differ in bits of the output"
    assert torch.equal(decoded.lse, extended.lse[last]), "decode and extend differ in bits of the LSE"
