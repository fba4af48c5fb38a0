"""Checks of the masks of latent attention, and of the merge of rows of several tokens, which only it has."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from rocm_attn.kernels.cache.page_format import Encoding, Scales
from rocm_attn.kernels.tuning.latent_tiles import LatentSegmentTiles, LatentTiles
from rocm_attn.problem import UNLIMITED_WINDOW
from tests.amd.kernels.attention_cases import Case, assert_served
from tests.amd.kernels.latent_cases import (
    run_latent_decode,
    run_latent_extend,
    run_latent_segment_decode,
    run_latent_segment_extend,
)
from tests.amd.mutation.memory import PAGE_SIZE, Memory
from tests.amd.mutation.placed_attention import attention

# With these dims both halves of V and the columns after V end within their blocks of columns.
LATENT_DIMS = (31, 20)
LATENT_TILES = LatentTiles(query_rows=16, key_block=16, num_warps=1, num_stages=1)
LATENT_SEGMENT_TILES = LatentSegmentTiles(segment_len=32, block=LATENT_TILES)
LATENT_SCORES: dict[str, Any] = {"window_left": 20, "soft_cap": 1.5, "sinks": True, "spread": True}


def latents(memory: Memory) -> None:
    """Checks latent decode of one token and of several, extend and masks, also in codes; dead codes are NaN."""
    few = {"kv_len": [33, 9, 70, 5, 0], "q_len": [3, 1, 5, 2, 0]}
    codes = {"kv": Encoding.E4M3FN, "scales": Scales.TOKEN}
    for run, heads, dims, case in (
        (run_latent_decode, 3, LATENT_DIMS, {"kv_len": [33, 0, 1, 16, 70], "q_len": [1] * 5}),
        (run_latent_decode, 19, LATENT_DIMS, {"kv_len": [90], "q_len": [1], "first_page": [2], **LATENT_SCORES}),
        (run_latent_decode, 3, LATENT_DIMS, {"kv_len": [33, 5], "q_len": [1] * 2, **codes}),
        (run_latent_decode, 3, (16, 16), {"kv_len": [33, 5], "q_len": [1] * 2}),
        (partial(run_latent_decode, most=5), 3, LATENT_DIMS, few),
        (partial(run_latent_decode, most=5), 19, LATENT_DIMS, few | LATENT_SCORES),
        (partial(run_latent_decode, most=5), 19, LATENT_DIMS, few | {"masked": True, "mask_keys": 4}),
        (run_latent_extend, 3, LATENT_DIMS, {"kv_len": [43, 18, 0], "q_len": [24, 18, 0], "tail": 3}),
        (
            run_latent_extend,
            19,
            LATENT_DIMS,
            {"kv_len": [21], "q_len": [2], "window_right": UNLIMITED_WINDOW, "tail": 1},
        ),
        (run_latent_extend, 3, LATENT_DIMS, {"kv_len": [43], "q_len": [24], "masked": True, **LATENT_SCORES}),
    ):
        serve_latents(memory, partial(run, tiles=LATENT_TILES), heads, dims, case)


def latent_segments(memory: Memory) -> None:
    """Checks deterministic latent extend and decode: cuts and diagonals within tiles, a window, empty sequences."""
    for run, case in (
        (run_latent_segment_extend, {"kv_len": [70, 18, 0], "q_len": [2, 18, 0], "tail": 3}),
        (run_latent_segment_extend, {"kv_len": [40, 33], "q_len": [2, 1], "window_right": UNLIMITED_WINDOW, "tail": 3}),
        (run_latent_segment_decode, {"kv_len": [97, 0, 32, 20], "q_len": [1] * 4}),
        (run_latent_segment_decode, {"kv_len": [97], "q_len": [1], **LATENT_SCORES}),
    ):
        for heads in (3, 19):
            serve_latents(memory, partial(run, tiles=LATENT_SEGMENT_TILES), heads, LATENT_DIMS, case)


def rows_of_several_tokens(memory: Memory) -> None:
    """Checks a row that programs share, and more empty sequences than programs, some of which have no work."""
    run = partial(run_latent_decode, most=5, compute_units=8, tiles=LATENT_TILES)
    serve_latents(memory, run, 3, LATENT_DIMS, {"kv_len": [60] + [0] * 9, "q_len": [4] + [0] * 9})


def serve_latents(
    memory: Memory, run: Callable[..., None], heads: int, dims: tuple[int, int], case: dict[str, Any]
) -> None:
    """Runs a step over latent pages, whose V is in their K, in memory."""
    tensors = attention(memory, Case(heads=(heads, 1), dims=dims, page_size=PAGE_SIZE, latent=True, **case))
    tensors = replace(tensors, v_pages=tensors.k_pages[..., : dims[1]], v_scale=tensors.k_scale)
    run(tensors, put=memory.put)
    assert_served(tensors)
