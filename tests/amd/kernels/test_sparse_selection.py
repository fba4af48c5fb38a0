"""Index scores and top-k: every token gets the units that a plain reading of Indexing gives it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.refs.sparse import select
from rocm_attn.kernels.sparse.arguments import Indexing, LastUnit, Pooling, TokenPlaces
from rocm_attn.kernels.sparse.cuts import select_words, top_k_cut
from rocm_attn.kernels.sparse.index_scores import launch_select
from rocm_attn.kernels.sparse.top_k import launch_top_k
from rocm_attn.kernels.tuning.sparse_tiles import index_tiles
from tests.amd.kernels.sparse_cases import (
    IndexCase,
    IndexProblem,
    Step,
    arch_of,
    assert_units,
    best_units,
    build_index,
    empty_selection,
)

STEP = Step([50, 1, 33, 90], [3, 1, 1, 20], tail=2)
INDEXINGS = {
    "tokens": Indexing(0.125, 7),
    "all_of_them": Indexing(0.125, 200),
    "forced": Indexing(0.125, 7, first=1, last=2),
    "nothing_but_forced": Indexing(0.25, 3, first=1, last=2),
    "blocks": Indexing(0.25, 3, sets=2, rectified=False, unit_keys=8, last=1),
    "means": Indexing(0.25, 3, unit_keys=4, pooling=Pooling.MEAN),
    "pools_and_tail": Indexing(0.25, 3, key_tokens=4, last_unit=LastUnit.ADDED),
    "pools": Indexing(0.25, 3, key_tokens=4, last_unit=LastUnit.LEFT_OUT),
    "blocks_of_pools": Indexing(0.25, 3, key_tokens=2, unit_keys=2, last_unit=LastUnit.ADDED),
}
every_indexing = pytest.mark.parametrize("indexing", INDEXINGS.values(), ids=INDEXINGS)


@every_indexing
def test_the_twin_selects_what_the_words_say(indexing: Indexing, kernel_device: torch.device) -> None:
    case = IndexCase(STEP, indexing)
    for scaled in (case, replace(case, scales=Scales.TOKEN, weighted=False), replace(case, scales=Scales.LAYER)):
        problem = build_index(scaled, kernel_device)
        select(problem.args, problem.selection, indexing=indexing)
        problem.assert_selected()


def lines_of(scores: Tensor, indexing: Indexing, *, longest_part: int = 8192) -> list[list[list[int]]]:
    """What launch_top_k chooses of scores [tokens, sets, units], of which each token has all; the words' answer."""
    num_tokens, _, max_units = scores.shape
    cut = top_k_cut(max_units, indexing, longest_part=longest_part)
    lines = torch.full((num_tokens, indexing.sets, cut.stride), float("nan"), device=scores.device)
    lines[:, :, :max_units] = scores
    scratch = torch.empty(lines[:, :, 0].numel() * cut.line_words, dtype=torch.int32, device=scores.device)
    visible = max_units * indexing.unit_tokens
    tokens = tokens_at([visible - 1] * num_tokens, scores.device)
    selection = empty_selection(num_tokens, indexing, scores.device)
    launch_top_k(lines, scratch, tokens, selection, indexing=indexing, cut=cut)
    expected = [[best_units(line, visible, indexing) for line in token] for token in scores.tolist()]
    assert_units(selection, expected)
    return expected


def tokens_at(positions: list[int], device: torch.device) -> TokenPlaces:
    """Tokens of one row each."""
    numbers = torch.tensor(positions, dtype=torch.int32, device=device)
    rows = torch.arange(len(positions), dtype=torch.int32, device=device)
    return TokenPlaces(
        rows, numbers, torch.tensor([len(positions)], dtype=torch.int32, device=device), 1, max(positions) + 1
    )


@pytest.mark.parametrize("longest_part", [16, 64, 8192])
def test_the_largest_scores_are_chosen_in_order(longest_part: int, kernel_device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    for top in (1, 5, 64, 300):
        scores = torch.randn(3, 1, 300, generator=generator).to(kernel_device)
        lines_of(scores, Indexing(1.0, top), longest_part=longest_part)


def selected(problem: IndexProblem, programs: int = 5) -> None:
    """launch_select, with the tiles of the device."""
    args, indexing = problem.args, problem.case.indexing
    tiles = index_tiles(arch_of(args.q.device), dim=problem.case.dim, key_dtype=args.pages.keys.dtype)
    words = select_words(len(args.q), args.tokens.max_kv_len, indexing)
    workspace = torch.empty(words, device=args.q.device)
    launch_select(args, problem.selection, workspace, indexing=indexing, tiles=tiles, programs=programs)
    problem.assert_selected()


@every_indexing
def test_every_token_gets_its_units(indexing: Indexing, kernel_device: torch.device) -> None:
    case = IndexCase(STEP, indexing)
    selected(build_index(case, kernel_device))
    selected(build_index(replace(case, scales=Scales.TOKEN, weighted=False), kernel_device), programs=40)
