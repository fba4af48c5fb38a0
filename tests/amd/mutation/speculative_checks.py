"""Checks of the masks of the kernels that accept drafts."""

from __future__ import annotations

from rocm_attn.kernels.metadata.error_word import LENGTH_BEYOND_BOUND
from rocm_attn.kernels.refs import speculative as twins
from rocm_attn.kernels.speculative.accept_drawn import launch_accept_drawn
from rocm_attn.kernels.speculative.accept_sampled import launch_accept_sampled
from rocm_attn.kernels.speculative.move_paths import launch_move_paths
from rocm_attn.kernels.speculative.next_step import launch_next_step
from tests.amd.kernels.speculative_cases import (
    drawn,
    layers_of_pages,
    of_accept_drawn,
    of_accept_sampled,
    of_move_paths,
    of_next_round,
    of_rounds,
    paths,
    probabilities,
    room,
    rounds,
    trees,
)
from tests.amd.mutation.memory import Memory, assert_same

_GARBAGE = 0x5A5A5A5A


def accept_drawn(memory: Memory) -> None:
    """Checks trees of five nodes, of three, of none, and one without a line of parents."""
    launch, twin = of_accept_drawn(launch_accept_drawn), of_accept_drawn(twins.accept_drawn)
    assert_same(memory, launch, twin, [drawn(), *trees()], room(_GARBAGE))


def accept_sampled(memory: Memory) -> None:
    """Checks the same trees, and rows of a few tokens with gaps after them."""
    launch, twin = of_accept_sampled(launch_accept_sampled), of_accept_sampled(twins.accept_sampled)
    assert_same(memory, launch, twin, [*probabilities(), *trees()], room(_GARBAGE))


def move_paths(memory: Memory) -> None:
    """Checks paths within rows of the table, at an invalid page, and past a row's end."""
    for no_page in (0, -1):
        launch, twin = of_move_paths(launch_move_paths, no_page), of_move_paths(twins.move_paths, no_page)
        assert_same(memory, launch, twin, paths(), [layers_of_pages()])


def next_step(memory: Memory) -> None:
    """Checks texts of one token and of more than a block, some with repetitions, and a length that is cut or kept."""
    launch, twin = of_next_round(launch_next_step, 3), of_next_round(twins.next_step, 3)
    # Programs run in any order: the reports of a program are there before, or none are.
    for last_limit, error in ((8, 64 | LENGTH_BEYOND_BOUND), (9, 64)):
        assert_same(memory, launch, twin, rounds(last_limit), of_rounds(_GARBAGE, error))
