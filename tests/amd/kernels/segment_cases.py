"""The deterministic kernels on the problems of attention_cases.py, and a step's last tokens as decodes of their own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rocm_attn.kernels.attention.decode_schedule import decode_schedule_words, launch_decode_schedule
from rocm_attn.kernels.attention.extend_schedule import extend_schedule_words, launch_extend_schedule
from rocm_attn.kernels.attention.segment_decode import launch_segment_decode, segment_parts_words, segment_slots
from rocm_attn.kernels.attention.segment_extend import launch_segment_extend
from rocm_attn.kernels.refs import segments as twins
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles
from tests.amd.kernels.attention_cases import UNTOUCHED, Tensors

GARBAGE = 0x7F7F7F7F


def run_decode(tensors: Tensors, *, num_programs: int, tiles: SegmentTiles) -> None:
    """Schedule, decode and merge, with scratch memory that is NaN or garbage beforehand."""
    case, device, ratio = tensors.case, tensors.q.device, tensors.gqa_ratio
    schedule = _garbage(decode_schedule_words(num_programs, tensors.num_seqs), device)
    launch_decode_schedule(
        tensors.kv_len,
        tensors.q_len,
        schedule,
        window_left=case.window_left,
        num_kv_heads=case.heads[1],
        num_programs=num_programs,
        tiles=tiles.decode(ratio),
    )
    most = tiles.most_segments(max(case.kv_len), case.window_left)
    slots = segment_slots(tensors.num_seqs, most, gqa_ratio=ratio, num_kv_heads=case.heads[1], tiles=tiles)
    words = sum(segment_parts_words(slots, gqa_ratio=ratio, v_head_dim=case.dims[1], tiles=tiles))
    launch_segment_decode(
        *_paged(tensors),
        schedule,
        torch.full((words,), float("nan"), device=device),
        *_results(tensors),
        scores=tensors.scores,
        most_segments=most,
        num_programs=num_programs,
        tiles=tiles,
    )


def run_extend(tensors: Tensors, *, min_q_len: int = 1, tiles: SegmentTiles) -> None:
    """Schedule and extend, with a schedule that is garbage beforehand."""
    num_tokens, ratio = tensors.q.shape[0], tensors.gqa_ratio
    words = extend_schedule_words(num_tokens, tensors.num_seqs, gqa_ratio=ratio, tiles=tiles.extend)
    schedule = _garbage(words, tensors.q.device)
    launch_extend_schedule(
        tensors.kv_len,
        tensors.q_indptr,
        schedule,
        min_q_len=min_q_len,
        num_tokens=num_tokens,
        gqa_ratio=ratio,
        tiles=tiles.extend,
    )
    launch_segment_extend(
        *_paged(tensors),
        schedule,
        *_results(tensors),
        scores=tensors.scores,
        max_q_len=max([*tensors.case.q_len, 0]),
        tiles=tiles,
    )


def run_decode_twin(tensors: Tensors) -> None:
    """The torch twin of run_decode."""
    twins.segment_decode(
        *_paged(tensors),
        None,
        None,
        *_results(tensors),
        scores=tensors.scores,
        most_segments=0,
        num_programs=0,
        tiles=None,
    )


def run_extend_twin(tensors: Tensors) -> None:
    """The torch twin of run_extend; it has no min_q_len."""
    max_q_len = max([*tensors.case.q_len, 0])
    twins.segment_extend(
        *_paged(tensors), None, *_results(tensors), scores=tensors.scores, max_q_len=max_q_len, tiles=None
    )


def last_tokens(tensors: Tensors) -> Tensors:
    """The last token of each sequence, all of which have new ones, as a decode step over the same pages."""
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
    """A decode of last tokens gave what extend gave for them."""
    last = (extended.q_indptr[1:] - 1).long()
    assert torch.equal(decoded.out, extended.out[last]), "decode and extend differ in bits of the output"
    assert torch.equal(decoded.lse, extended.lse[last]), "decode and extend differ in bits of the LSE"


def _garbage(words: int, device: torch.device) -> Tensor:
    return torch.full((words,), GARBAGE, dtype=torch.int32, device=device)


def _paged(tensors: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    t = tensors
    return t.q, t.k_pages, t.v_pages, t.table, t.row_of_seq, t.kv_len, t.q_indptr


def _results(tensors: Tensors) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    return tensors.out, tensors.lse, tensors.sinks, tensors.slopes
