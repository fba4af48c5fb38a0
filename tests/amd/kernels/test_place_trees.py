"""Masks and positions of draft trees that the device computes, against walks from each node to its root."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_attn.kernels.metadata.error_word import BAD_PARENT, ERROR_WORD
from rocm_attn.kernels.metadata.place_trees import launch_place_trees
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.refs.metadata import place_trees
from tests.amd.kernels.attention_cases import GARBAGE, garbage, ints

Place = Callable[[torch.Tensor, int, int, int, StepTensors], None]

both = pytest.mark.parametrize("place", [launch_place_trees, place_trees], ids=["kernel", "twin"])
Tree = Sequence[int]
# Number of keys before its own that a node sees: fewer than some branches have nodes.
WINDOW = 2


def step_of(older: Sequence[int], q_len: Sequence[int], pads: tuple[int, int], device: torch.device) -> StepTensors:
    """Returns a step's lengths, with garbage as its mask. older: tokens before the new ones; pads: sequences, tokens"""
    num_tokens, nothing = sum(q_len), [0] * pads[0]
    return StepTensors.of(
        ints([], device),
        counts=ints([len(q_len), num_tokens, 1, 0], device),
        kv_len=ints([*(before + new for before, new in zip(older, q_len, strict=True)), *nothing], device),
        q_len=ints([*q_len, *nothing], device),
        mask_start=garbage(len(q_len) + pads[0], device),
        mask_words=garbage(60, device),
        mask_positions=garbage(num_tokens + pads[1], device),
        window_start=garbage(num_tokens + pads[1], device),
    )


def walked(
    trees: Sequence[Tree], older: Sequence[int], nodes_before: int, window_left: int
) -> tuple[list[bool], list[int], list[int]]:
    """Returns the cells, positions and windows' first keys of trees, token by token."""
    cells, positions, window_start = [], [], []
    for parents, before in zip(trees, older, strict=True):
        for node in range(nodes_before, len(parents)):
            branch = [node]
            while 0 <= parents[branch[-1]] < branch[-1]:
                branch.append(parents[branch[-1]])
            cells += [other in branch for other in range(len(parents))]
            start, depth = before - nodes_before, len(branch) - 1
            positions.append(start + depth)
            window_start.append(start + (branch[window_left] if depth >= window_left else depth - window_left))
    return cells, positions, window_start


def check(place: Place, trees: Sequence[Tree], older: Sequence[int], nodes_before: int, device: torch.device) -> None:
    """Places trees, twice, and compares all of it; parents have a stride, and rows have garbage after their nodes."""
    most = max(map(len, trees), default=0)
    wide = torch.full((len(trees), most + 3), GARBAGE, dtype=torch.int32)
    for line, tree in zip(wide, trees, strict=True):
        line[: len(tree)] = torch.tensor(tree, dtype=torch.int32)
    step = step_of(older, [len(tree) - nodes_before for tree in trees], (2, 5), device)
    parents = wide.to(device)[:, : most + 1]
    for _ in range(2):
        place(parents, nodes_before, 0, WINDOW, step)
    cells, positions, window_start = walked(trees, older, nodes_before, WINDOW)
    starts = [before - nodes_before for before in older]
    wrong = any(parent >= node for tree in trees for node, parent in enumerate(tree) if node >= nodes_before)
    assert step.counts.tolist()[ERROR_WORD:] == [BAD_PARENT if wrong else 0]
    assert step.mask_start.tolist() == [*starts, 0, 0]
    assert step.mask_positions.tolist() == positions + [0] * 5
    assert step.window_start.tolist() == window_start + [0] * 5
    words = [word % 2**32 for word in step.mask_words.tolist()]
    bits = [bool(word >> place & 1) for word in words for place in range(32)]
    assert bits[: len(cells)] == cells
    assert bits[len(cells) :] == [bool(GARBAGE >> place & 1) for _ in words for place in range(32)][len(cells) :]


def trees_of(nodes_before: int) -> st.SearchStrategy[list[tuple[int, ...]]]:
    """Draws up to five trees; parents that do not come before their child count as none."""
    return st.lists(
        st.integers(nodes_before, 9).flatmap(lambda n: st.tuples(*(st.integers(-2, node + 1) for node in range(n)))),
        max_size=5,
    )


@pytest.mark.fast
@both
@pytest.mark.parametrize("nodes_before", [0, 2])
@settings(max_examples=2)
@given(data=st.data())
def test_a_draft_sees_the_prefix_its_ancestors_and_itself(
    place: Place, nodes_before: int, data: st.DataObject, kernel_device: torch.device
) -> None:
    drawn = data.draw(trees_of(nodes_before))
    older = data.draw(st.lists(st.integers(nodes_before, 70), min_size=len(drawn), max_size=len(drawn)))
    check(place, drawn, older, nodes_before, kernel_device)


@pytest.mark.fast
@both
@pytest.mark.parametrize("num_nodes", [1, 31, 32, 33])
def test_long_branches_are_followed_to_their_ends(place: Place, num_nodes: int, kernel_device: torch.device) -> None:
    """A chain is causal, and its positions are places in the KV."""
    check(place, [range(-1, num_nodes - 1)], [20], 0, kernel_device)


@pytest.mark.nightly
@both
def test_more_sequences_than_a_program_looks_at_in_one_step(place: Place, kernel_device: torch.device) -> None:
    trees = [[-1, 0, 0][: 1 + seq % 3] for seq in range(270)]
    check(place, trees, list(range(270)), 0, kernel_device)


@both
def test_lengths_that_leave_no_room_for_older_nodes_stay_within_the_row(
    place: Place, kernel_device: torch.device
) -> None:
    """There are fewer keys before the new ones than nodes. The existing keys have cells."""
    step = step_of([1], [2], (0, 0), kernel_device)
    parents = torch.tensor([[-1, 0, 1, 2, 3]], dtype=torch.int32, device=kernel_device)
    place(parents, 3, 0, WINDOW, step)
    assert step.mask_start.tolist() == [0]
    assert step.mask_positions.tolist() == [1, 2]
    assert step.mask_words.tolist()[0] & 0b111111 == 0b111_011


@pytest.mark.fast(2)
@both
@pytest.mark.parametrize(
    ("parents", "cells", "is_wrong"),
    [
        # The cells of each draft: four older nodes, then the new ones, the lowest bit first.
        ((-1, -1, 0, 1, 3, 2), (0b011010, 0b100101), False),
        ((-1, -1, 0, 0, 2, 2), (0b010101, 0b100101), False),
        ((-1, -1, 0, 1, 4, 2), (0b010000, 0b100101), True),  # itself
        ((-1, -1, 0, 1, 3, 4), (0b011010, 0b100000), True),  # another one of its own step
        ((-1, -1, 0, 1, 1, 2), (0b010000, 0b100101), True),  # two steps before
        ((-1, -1, 0, 1, -1, 2), (0b010000, 0b100101), True),  # none, which only the first step has
        ((-1, -1, 0, 1, 3, 2**31 - 1), (0b011010, 0b100000), True),
        ((7, -1, 0, 1, 3, 2), (0b011010, 0b100101), False),  # of a step that reported it itself
    ],
)
def test_a_drafts_parent_is_one_of_the_step_before(
    place: Place, parents: Sequence[int], cells: tuple[int, int], is_wrong: bool, kernel_device: torch.device
) -> None:
    """The third step of two branches has two equal sequences, and a pad, whose parents are not read."""
    step = step_of([9, 9], [2, 2], (1, 0), kernel_device)
    step.kv_len[2], step.q_len[2] = 6, 2
    lines = torch.tensor([parents, parents, [99] * 6], dtype=torch.int32, device=kernel_device)
    for _ in range(2):
        place(lines, 4, 2, WINDOW, step)
    assert step.counts.tolist() == [2, 4, 1, BAD_PARENT if is_wrong else 0]
    assert int(step.mask_words[0]) & (2**24 - 1) == (cells[0] | cells[1] << 6) * (1 + 2**12)
