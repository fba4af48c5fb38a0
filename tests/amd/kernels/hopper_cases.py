"""Launches of extend for Hopper on the problems of attention_cases.py, and cases that several suites run."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.kernels.attention.cuts import NEVER_SPLIT, ExtendCut, RowSharing
from rocm_attn.kernels.cache.page_format import Encoding, Scales
from rocm_attn.kernels.tuning.hopper_tiles import HopperTiles, hopper_tiles
from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_attn.providers.triton_later import hopper_launches
from tests.amd.kernels.attention_cases import (
    ALL_SHARED,
    UNTOUCHED,
    Case,
    Tensors,
    extend_cut,
)


def seventh_by_day(names: str, cases: Iterable[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Parametrizes names; the other cases are the night's. Seven divides the length of no list of values here."""
    params = [pytest.param(*case, marks=[pytest.mark.nightly] * (at % 7 > 0)) for at, case in enumerate(cases)]
    return pytest.mark.parametrize(names, params)


# A prefix and several tiles, nothing at all, no prefix, one new token, a cached sequence without new tokens.
RAGGED = Case(
    kv_len=[260, 0, 40, 333, 1, 130, 12, 400],
    q_len=[41, 0, 40, 2, 1, 1, 0, 33],
    tail=3,
    heads=(8, 2),
    dims=(128, 128),
    dtype=torch.bfloat16,
)
CODINGS = [
    *((Encoding.E4M3FN, scales) for scales in (Scales.LAYER, Scales.HEAD, Scales.TOKEN)),
    *((Encoding.E5M2, scales) for scales in (Scales.HEAD, Scales.TOKEN)),
]
# No row is shared: the cost is too high.
NONE_SHARED = ALL_SHARED._replace(split_keys=NEVER_SPLIT)


def run_hopper(
    tensors: Tensors, sharing: RowSharing, *, min_q_len: int = 1, tiles: HopperTiles | None = None, launches: int = 1
) -> ExtendCut:
    """Runs schedule, extend and merge, with scratch memory that is NaN or garbage before.

    min_q_len: 2 as in mixed steps; with 1, extend and merge are launched early
    launches:  over one schedule
    """
    tiles = tiles or hopper_tiles(*tensors.case.dims, tensors.case.page_size, coded=tensors.case.kv is not None)
    tiles = replace(tiles, extend=replace(tiles.extend, early=min_q_len == 1))
    if tiles.segment_len:
        sharing = sharing._replace(most_keys=tiles.most_keys)
    cut = extend_cut(tensors, tiles.extend, sharing, min_q_len=min_q_len)
    words = cut.partials_words(query_rows=tiles.extend.query_rows, v_head_dim=tensors.case.dims[1])
    if tiles.segment_len:
        words = tiles.segment_words(programs=sharing.programs, v_head_dim=tensors.case.dims[1])
    args = tensors.extend_args(cut, words)
    for _ in range(launches):
        if launches > 1:
            tensors.out.fill_(UNTOUCHED)
        hopper_launches.launch_hopper_extend(args, scores=tensors.scores, cut=cut, tiles=tiles, mask=tensors.mask)
    return cut


def with_each_loop(tiles: HopperTiles, case: Case) -> list[HopperTiles]:
    """Returns tiles with one loop over all steps of a window, and with one for those that all rows see."""
    return [replace(tiles, open_middle=least) for least in (0, 1)] if case.window_left >= 0 else [tiles]


RANGES: list[dict[str, Any]] = [
    {},
    {"page_size": 2, "sinks": True},
    {"window_left": 0, "page_size": 8},
    {"window_left": 5, "spans_pass": True},
    {"window_left": 100, "spans_pass": True, "page_size": 64, "sinks": True},
    {"window_left": 300, "heads": (6, 2)},
    {"window_right": UNLIMITED_WINDOW},
    {"chunk": 16, "window_left": 15},
    {"chunk": 128, "window_left": 127, "page_size": 1},
    {"chunk": 200, "window_left": 199, "heads": (5, 1), "spans_pass": True},
    {"chunk": 256, "window_left": 99, "soft_cap": 30.0, "dtype": torch.float16},
    {"soft_cap": 50.0, "heads": (65, 1)},
]
