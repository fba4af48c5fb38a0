"""Deterministic extend for Hopper: the bits of a token in each chunk and sharing, of decode and of the plain kernel.

It needs that GPU.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rocm_attn.kernels.attention.cuts import SHARE_WORDS, ExtendCut, RowSharing
from rocm_attn.kernels.attention.extend_schedule import SHARE_CUT
from rocm_attn.kernels.tuning.hopper_tiles import DIMS, HopperTiles, hopper_segment_tiles
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles, segment_tiles
from rocm_attn.providers.triton_hopper import MIN_HEAD_DIM
from tests.amd.kernels import segment_cases
from tests.amd.kernels.attention_cases import (
    ALL_SHARED,
    UNTOUCHED,
    Case,
    Tensors,
    assert_served,
    build,
)
from tests.amd.kernels.gpus import OF_HOPPERS_KERNELS
from tests.amd.kernels.hopper_cases import CODINGS, NONE_SHARED, RAGGED, RANGES, run_hopper, seventh_by_day
from tests.amd.kernels.segment_cases import assert_same_bits, last_tokens
from tests.amd.schedule_twins import extend_schedule

pytestmark = OF_HOPPERS_KERNELS


def tiles_of(case: Case) -> HopperTiles:
    """Returns the tiles that serve a case."""
    return hopper_segment_tiles(*case.dims, case.page_size, coded=case.kv is not None)


def plain_tiles_of(case: Case) -> SegmentTiles:
    """Returns the tiles that the plain kernels serve a case with."""
    head_dim, v_head_dim = case.dims
    return segment_tiles("sm_90", head_dim=head_dim, v_head_dim=v_head_dim, dtype=case.dtype, codes=case.codes)


def run_segments(tensors: Tensors, *, sharing: RowSharing = NONE_SHARED) -> ExtendCut:
    """Runs the deterministic schedule, extend and merge."""
    return run_hopper(tensors, sharing, tiles=tiles_of(tensors.case))


# Spans across borders of segments, and one that reaches two segments further than its first query block.
SPANS_OF_SEGMENTS: dict[str, Any] = {
    "kv_len": [2100, 70, 3000, 1025],
    "q_len": [1500, 40, 33, 65],
    "spans": ((0, 700, 2050), (0, 2050, 2080), (1, 31, 60), (2, 2967, 3000), (3, 1000, 1025)),
}


RANGES_OF_DIMS = [
    *product([more for more in RANGES if "heads" not in more], (*DIMS, (MIN_HEAD_DIM, MIN_HEAD_DIM), (96, 64))),
    *(
        ({**more, "kv": kv, "scales": scales, "page_size": 64}, dims)
        for (kv, scales), dims in product(CODINGS, [(64, 64), (128, 128)])
        for more in ({}, {"chunk": 256, "window_left": 99, "soft_cap": 30.0, "dtype": torch.float16})
    ),
]


@seventh_by_day("more, dims", RANGES_OF_DIMS)
def test_deterministic_extend_by_ranges_gives_the_bits_of_the_plain_kernel(
    more: dict[str, Any], dims: tuple[int, int], device: torch.device
) -> None:
    tensors = build(replace(RAGGED, **SPANS_OF_SEGMENTS, **more, dims=dims), device)
    run_segments(tensors)
    assert_served(tensors)
    plain = replace(tensors, out=torch.full_like(tensors.out, UNTOUCHED), lse=torch.full_like(tensors.lse, UNTOUCHED))
    segment_cases.run_extend(plain, tiles=plain_tiles_of(tensors.case).of_masked_steps())
    assert torch.equal(plain.out, tensors.out)
    assert torch.equal(plain.lse, tensors.lse)


def last_of(tensors: Tensors, new: int) -> tuple[Tensors, Tensor]:
    """Returns the last `new` tokens of each sequence as a separate chunk over the same pages, and their places."""
    ends = tensors.q_indptr[1:].tolist()
    at = torch.tensor([token for end in ends for token in range(end - new, end)], device=tensors.q.device)
    chunk = replace(
        tensors,
        case=replace(tensors.case, q_len=[new] * len(ends), tail=0),
        q=tensors.q[at].contiguous(),
        q_len=torch.full_like(tensors.q_len, new),
        q_indptr=torch.arange(len(ends) + 1, dtype=torch.int32, device=at.device) * new,
        out=torch.full_like(tensors.out[at], UNTOUCHED),
        lse=torch.full_like(tensors.lse[at], UNTOUCHED),
        reference=tensors.reference[at],
        reference_lse=tensors.reference_lse[at],
    )
    return chunk, at


SEGMENTS = Case([2100, 1024, 70, 1025, 3000], [70, 33, 40, 65, 33], heads=(8, 2), dims=(128, 128), dtype=torch.bfloat16)


# Shares of several segments, of one, and of less than one: then most programs have none of a row.
SHARED_SEGMENTS = [ALL_SHARED._replace(programs=programs) for programs in (16, 48, 132)]
# Rows that are cut alike, into parts of one segment and of two.
SHARED_SEGMENTS += [ALL_SHARED._replace(programs=programs, split_keys=1 << 13, alike_keys=1) for programs in (132, 60)]


SEGMENT_SCORES: list[dict[str, Any]] = [
    {},
    {"dtype": torch.float16, "page_size": 64},
    {"sinks": True, "page_size": 8},
    {"page_size": 2},
    {"window_left": 1500, "sinks": True},
    {"heads": (6, 1), "tail": 5},
    {"soft_cap": 30.0},
    {"soft_cap": 61.0, "sinks": True, "dtype": torch.float16},
    {"soft_cap": 1.5, "window_left": 1500},
]


CODED_SCORES: list[dict[str, Any]] = [
    {"kv": kv, "scales": scales, **more}
    for kv, scales in CODINGS
    for more in (
        {"page_size": 128},
        {"dtype": torch.float16, "page_size": 64},
        {"window_left": 1500, "sinks": True, "page_size": 8},
        {"soft_cap": 30.0, "heads": (6, 1), "tail": 5},
    )
]
CODED_DIMS = [(64, 64), (96, 96), (128, 128), (128, 64), (80, 48)]
ODD_DIMS = [(MIN_HEAD_DIM, MIN_HEAD_DIM), (80, 80), (144, 144), (224, 224), (40, 128), (256, 72)]


@seventh_by_day("scores, dims", [*product(SEGMENT_SCORES, (*DIMS, *ODD_DIMS)), *product(CODED_SCORES, CODED_DIMS)])
def test_deterministic_extend_gives_a_token_the_bits_of_every_chunk_and_of_decode(
    scores: dict[str, Any], dims: tuple[int, int], device: torch.device
) -> None:
    tensors = build(replace(SEGMENTS, dims=dims, **scores), device)
    run_segments(tensors)
    assert_served(tensors)
    for new in (1, 2, 31, 33):
        chunk, at = last_of(tensors, new)
        run_segments(chunk)
        assert torch.equal(chunk.out, tensors.out[at])
        assert torch.equal(chunk.lse, tensors.lse[at])
    for sharing in SHARED_SEGMENTS:
        shared = replace(
            tensors, out=torch.full_like(tensors.out, UNTOUCHED), lse=torch.full_like(tensors.lse, UNTOUCHED)
        )
        cut = run_segments(shared, sharing=sharing)
        words = extend_schedule(tensors.case.kv_len, tensors.case.q_len, cut, tensors.q.shape[0])
        assert words[SHARE_CUT.value - SHARE_WORDS] > 0, "nothing is shared"
        assert torch.equal(shared.out, tensors.out)
        assert torch.equal(shared.lse, tensors.lse)
    decoded = last_tokens(tensors)
    tiles = plain_tiles_of(tensors.case)
    segment_cases.run_decode(decoded, num_programs=132, tiles=tiles)
    assert_same_bits(decoded, tensors)
    # The plain kernel's tiles of few rows also give these bits. They serve steps of a few drafts per sequence.
    assert tiles.short
    for short in tiles.of_short_steps(tensors.gqa_ratio):
        chunk, at = last_of(tensors, 5)
        segment_cases.run_extend(chunk, tiles=short)
        assert torch.equal(chunk.out, tensors.out[at])
        assert torch.equal(chunk.lse, tensors.lse[at])
