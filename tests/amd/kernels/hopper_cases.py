"""Steps of extend for Hopper: its cases, and their runs with NaN in everything that may not be read."""

from __future__ import annotations

from dataclasses import replace

import torch

from rocm_attn.kernels.attention.cuts import NEVER_SPLIT, ExtendCut, RowSharing
from rocm_attn.kernels.attention.extend_schedule import launch_extend_schedule
from rocm_attn.kernels.tuning.hopper_tiles import HopperTiles, hopper_tiles
from rocm_attn.providers.triton_later import hopper_launches
from tests.amd.kernels.attention_cases import (
    ALL_SHARED,
    UNTOUCHED,
    Case,
    Tensors,
    assert_served,
    build,
    extend_cut,
    garbage,
)

# A prefix and several tiles, nothing at all, no prefix, one new token, a cached sequence without new tokens.
RAGGED = Case(
    kv_len=[260, 0, 40, 333, 1, 130, 12, 400],
    q_len=[41, 0, 40, 2, 1, 1, 0, 33],
    tail=3,
    heads=(8, 2),
    dims=(128, 128),
    dtype=torch.bfloat16,
)
# No row is shared: the cost is too high.
NONE_SHARED = ALL_SHARED._replace(split_keys=NEVER_SPLIT)
# Every page size, each with a number of heads and a dtype.
FORMS = [
    (8, (6, 2), torch.float16),
    (16, (8, 2), torch.bfloat16),
    (32, (2, 2), torch.bfloat16),
    (64, (16, 1), torch.float16),
    (128, (5, 1), torch.bfloat16),
]


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
    device = tensors.q.device
    schedule = garbage(cut.words(tensors.q.shape[0], tensors.num_seqs), device)
    words = cut.partials_words(query_rows=tiles.extend.query_rows, v_head_dim=tensors.case.dims[1])
    if tiles.segment_len:
        words = tiles.segment_words(programs=sharing.programs, v_head_dim=tensors.case.dims[1])
    partials = torch.full((words,), float("nan"), device=device)
    launch_extend_schedule(tensors.queries, schedule, cut)
    args = tensors.args(schedule, partials)
    for _ in range(launches):
        if launches > 1:
            tensors.out.fill_(UNTOUCHED)
        hopper_launches.launch_hopper_extend(args, scores=tensors.scores, cut=cut, tiles=tiles)
    return cut


def assert_right(case: Case, device: torch.device) -> None:
    """Checks the case with every row shared, and with none."""
    for sharing in (ALL_SHARED, NONE_SHARED):
        tensors = build(case, device)
        run_hopper(tensors, sharing)
        assert_served(tensors)
