"""Index scores and top-k: every token gets the units of a plain reading of Indexing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.refs import sparse
from rocm_attn.kernels.refs.sparse import check_selection, select
from rocm_attn.kernels.sparse import cuts
from rocm_attn.kernels.sparse.arguments import (
    BAD_COUNT,
    NOT_ASCENDING,
    OUTSIDE,
    Indexing,
    LastUnit,
    Pooling,
    SelectedKeys,
    SparseTokens,
)
from rocm_attn.kernels.sparse.check import launch_check_selection
from rocm_attn.kernels.sparse.cuts import index_splits, select_words, top_k_cut
from rocm_attn.kernels.sparse.top_k import launch_top_k
from rocm_attn.machine.target import detect_target
from tests.amd.kernels.sparse_cases import (
    IndexCase,
    IndexProblem,
    Step,
    TwoChoices,
    assert_units,
    best_units,
    build_index,
    empty_selection,
    run_select,
)
from tests.amd.runner.metered_memory import MeteredMemory

STEP = Step([50, 1, 33], [3, 1, 1], tail=2)
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


def most_held(call: Callable[[], object]) -> int:
    """Returns the most bytes that tensors of a call hold at a time."""
    memory = MeteredMemory(0)
    with memory:
        call()
    return memory.most_held()


@pytest.mark.parametrize("name", ["tokens", "blocks", "pools"])
def test_the_twin_holds_no_more_memory_than_it_may(
    name: str, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for any number of keys; the selection is the same."""
    indexing, words = INDEXINGS[name], 1 << 14
    case = IndexCase(Step([700, 300], [3, 1]), indexing, heads=8, dim=64, scales=Scales.TOKEN)
    problem = build_index(case, kernel_device)
    whole = most_held(lambda: select(problem.args, problem.selection, indexing=indexing))
    for most in ("_MOST_WORDS", "_MOST_WORDS_ON_GPU"):
        monkeypatch.setattr(sparse, most, words)
    problem = build_index(case, kernel_device)
    bounded = most_held(lambda: select(problem.args, problem.selection, indexing=indexing))
    problem.assert_selected()
    of_a_token = 4 * 20 * indexing.sets * indexing.max_units(problem.args.tokens.max_kv_len)
    assert bounded <= 4 * words + of_a_token < whole


def lines_of(scores: Tensor, indexing: Indexing, *, longest_part: int = 8192) -> list[list[list[int]]]:
    """Returns launch_top_k's choice for scores [tokens, sets, units], all visible, checked against best_units."""
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


def tokens_at(positions: list[int], device: torch.device) -> SparseTokens:
    numbers = torch.tensor(positions, dtype=torch.int32, device=device)
    rows = torch.arange(len(positions), dtype=torch.int32, device=device)
    return SparseTokens(
        rows, numbers, torch.tensor([len(positions)], dtype=torch.int32, device=device), 1, max(positions) + 1
    )


LEAVING = {
    "V4.1": Indexing(0.125, 5, candidate_blocks=3, block_keys=8),
    "sets": Indexing(0.25, 4, sets=2, rectified=False, candidate_blocks=5, block_keys=4),
    "fewer than the choice": Indexing(0.125, 7, candidate_blocks=2, block_keys=2),
    "all of them": Indexing(0.125, 7, candidate_blocks=40, block_keys=2),
}


@pytest.mark.fast(1)
@pytest.mark.parametrize("indexing", LEAVING.values(), ids=LEAVING)
@pytest.mark.parametrize("is_kernel", [True, False], ids=["kernel", "twin"])
def test_a_later_choice_is_made_among_the_blocks_that_were_left(
    indexing: Indexing, is_kernel: bool, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scratch has room for a few tokens at a time, so that blocks are those of the right tokens."""
    monkeypatch.setattr(cuts, "_MOST_WORDS", 150)
    monkeypatch.setattr(sparse, "_MOST_WORDS", 1 << 10)
    both = TwoChoices.build(IndexCase(STEP, indexing), kernel_device)
    for problem in (both.of_blocks, both.later):
        if is_kernel:
            run_select(detect_target(kernel_device).arch, problem, programs=5)
        else:
            select(problem.args, problem.selection, indexing=problem.case.indexing)
    both.assert_chosen()


@pytest.mark.parametrize(
    "wrong",
    [
        {"candidate_blocks": -1},
        {"candidate_blocks": 2, "block_keys": 3},
        {"candidate_blocks": 2, "last": 1},
        {"candidate_blocks": 2, "key_tokens": 2, "last_unit": LastUnit.LEFT_OUT},
    ],
)
def test_blocks_that_cannot_be_left_are_refused(wrong: dict[str, Any]) -> None:
    assert "blocks of a power of two of keys are left only where units are single" in Indexing(1.0, 4, **wrong).refusal


NAN, INF = float("nan"), float("inf")
RANDOM = torch.randn(70, generator=torch.Generator().manual_seed(0)).tolist()
LINES = {
    "few_values": [float(round(score)) for score in RANDOM[:40]],
    "random": RANDOM,
    "equal": [0.5] * 70,
    "zeros_of_both_signs": [-0.0, 0.0] * 35,
    "nan": [NAN if index % 3 else score for index, score in enumerate(RANDOM)],
    "nothing_but_nan": [NAN] * 70,
    "extremes": [INF, -INF, 3e38, -3e38, 1e-45, -1e-45, NAN] * 10,
}


@pytest.mark.fast(1)
@pytest.mark.parametrize("longest_part", [16, 8192])
@pytest.mark.parametrize("scores", LINES.values(), ids=LINES)
def test_the_largest_scores_are_chosen_and_of_equal_ones_the_first(
    scores: list[float], longest_part: int, kernel_device: torch.device
) -> None:
    """One program searches some lines, and others are cut down first."""
    given = torch.tensor([[scores]], device=kernel_device)
    lines_of(given, Indexing(1.0, 20), longest_part=longest_part)
    if scores is RANDOM:
        lines_of(given, Indexing(1.0, 5, first=1, last=2), longest_part=longest_part)
        lines_of(given.expand(1, 2, 70), Indexing(1.0, 1, sets=2), longest_part=longest_part)


def test_a_forced_unit_is_chosen_whatever_its_score(kernel_device: torch.device) -> None:
    scores = torch.tensor([[[NAN, -INF, 1.0, 2.0, NAN]]], device=kernel_device)
    assert lines_of(scores, Indexing(1.0, 3, first=1, last=1)) == [[[0, 3, 4]]]


def test_units_that_no_token_may_have_are_not_even_counted(kernel_device: torch.device) -> None:
    """A token at position 2 has 3 of 5 scores; a token of no sequence has none."""
    lines = torch.full((2, 1, 8), NAN, device=kernel_device)
    lines[0, 0, :5] = torch.tensor([1.0, 2.0, 3.0, 9.0, 9.0])
    indexing = Indexing(1.0, 2)
    cut = top_k_cut(5, indexing)
    tokens = tokens_at([2, 4], kernel_device)
    tokens.num_tokens.fill_(1)
    selection = empty_selection(2, indexing, kernel_device)
    scratch = torch.empty(0, dtype=torch.int32, device=kernel_device)
    launch_top_k(lines, scratch, tokens, selection, indexing=indexing, cut=cut)
    assert_units(selection, [[[1, 2]]])


def selected(problem: IndexProblem, programs: int = 5) -> None:
    """Runs launch_select, with the tiles of the device, and checks what it has chosen."""
    run_select(detect_target(problem.args.q.device).arch, problem, programs)
    problem.assert_selected()


@pytest.mark.fast(2, interpreted=1)
@every_indexing
def test_every_token_gets_its_units(indexing: Indexing, kernel_device: torch.device) -> None:
    case = IndexCase(STEP, indexing)
    selected(build_index(case, kernel_device))
    selected(build_index(replace(case, scales=Scales.TOKEN, weighted=False), kernel_device), programs=12)


def test_tokens_are_scored_as_many_at_a_time_as_scratch_holds(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = build_index(IndexCase(STEP, Indexing(0.125, 7)), kernel_device)
    whole = select_words(len(problem.args.q), problem.args.tokens.max_kv_len, problem.case.indexing)
    monkeypatch.setattr(cuts, "_MOST_WORDS", whole // 3)
    assert select_words(len(problem.args.q), problem.args.tokens.max_kv_len, problem.case.indexing) <= whole // 3
    selected(problem)


CODED = {
    "queries_too": IndexCase(STEP, Indexing(0.125, 7), dtype=torch.float8_e4m3fn, key_dtype=torch.float8_e4m3fn),
    "keys": IndexCase(STEP, Indexing(0.125, 7), key_dtype=torch.float8_e4m3fnuz, scales=Scales.LAYER),
}


@pytest.mark.fast(1)
@pytest.mark.parametrize("case", CODED.values(), ids=CODED)
def test_keys_and_queries_may_be_eight_bit_codes(case: IndexCase, kernel_device: torch.device) -> None:
    selected(build_index(case, kernel_device))


def test_a_key_that_is_nan_is_never_chosen(kernel_device: torch.device) -> None:
    for indexing in (Indexing(0.125, 60), Indexing(0.25, 20, unit_keys=4)):
        problem = build_index(IndexCase(STEP, indexing), kernel_device)
        args, step = problem.args, problem.case.step
        page, offset = step.slots(0, step.page_size)[5]
        args.pages.keys[page, offset, 3] = NAN
        for token in range(3):
            problem.scores[token][:, 5 // indexing.unit_tokens] = NAN
        selected(problem)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (None, 0),
        ((0, [0, 2, 2]), NOT_ASCENDING),
        ((0, [2, 1, 3]), NOT_ASCENDING),
        ((0, [-1, 1, 3]), OUTSIDE),
        ((1, [0, 1, 4]), OUTSIDE),
        ((2, [0, 1]), BAD_COUNT | OUTSIDE),
        ((3, [0, 7, 3]), 0),  # a pad, of whatever a forward has made of its hidden state
    ],
)
def test_a_selection_that_leaves_its_sequence_is_reported(
    change: tuple[int, list[int]] | None, fault: int, kernel_device: torch.device
) -> None:
    """Four tokens with units of 4: positions 13 and 15, of four units, 0, of one, and one of no sequence."""
    units = torch.tensor([[[0, 1, 3]], [[0, 2, -1]], [[0, -1, -1]], [[-1, -1, -1]]], dtype=torch.int32)
    counts = torch.tensor([[3], [2], [1], [0]], dtype=torch.int32)
    if change is not None:
        token, listed = change
        units[token, 0, : len(listed)] = torch.tensor(listed, dtype=torch.int32)
        counts[token] = len(listed)
    tokens = tokens_at([13, 15, 0, 0], kernel_device)
    tokens.num_tokens.fill_(3)
    for check in (launch_check_selection, check_selection):
        faults = torch.zeros(1, dtype=torch.int32, device=kernel_device)
        check(SelectedKeys(units.to(kernel_device), counts.to(kernel_device), 4), tokens, faults)
        assert faults.tolist() == [fault]


@pytest.mark.parametrize(
    ("blocks", "key_blocks", "programs", "splits"),
    [
        (64, 1024, 1056, 33),  # two whole rounds; 16 leave 32 of 1056 idle, 17 begin a second round for 32
        (64, 1024, 1024, 16),
        (1, 2048, 1056, 1056),
        (1, 20, 1056, 20),
        (2000, 1024, 1056, 1),
        (0, 16, 8, 8),
        (3, 0, 8, 1),
    ],
)
def test_programs_that_score_fill_the_rounds_of_the_device(
    blocks: int, key_blocks: int, programs: int, splits: int
) -> None:
    assert index_splits(blocks, key_blocks, programs) == splits
