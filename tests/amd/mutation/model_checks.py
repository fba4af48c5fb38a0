"""Checks of the masks of sums with norms, of gates, of products of one row, and of sums over ranks."""

from __future__ import annotations

import torch

from tests.amd.kernels.model_cases import (
    FORMS,
    OneOfRanks,
    assert_gated,
    assert_multiplied_and_gated,
    assert_row_multiplied,
    sum_of_rows,
)
from tests.amd.mutation.memory import Memory


def add_norm(memory: Memory) -> None:
    """Checks rows that do not fill a block."""
    sum_of_rows(3, 40, torch.float32).assert_served(memory.put)
    memory.assert_surroundings_untouched()


def gate(memory: Memory) -> None:
    """Checks rows whose halves do not fill a block, or the second one."""
    for form, inner in zip(FORMS, (40, 1032, 40), strict=True):
        assert_gated(2, inner, form, torch.float32, put=memory.put)
    memory.assert_surroundings_untouched()


def row_product(memory: Memory) -> None:
    """Checks a row and a matrix that fill no tile."""
    assert_row_multiplied((7, 52), torch.float32, put=memory.put, has_bias=True)
    memory.assert_surroundings_untouched()


def gated_rows(memory: Memory) -> None:
    """Checks rows that do not fill a block."""
    assert_multiplied_and_gated((3, 64, 128), FORMS[0], torch.float32, put=memory.put)
    memory.assert_surroundings_untouched()


def peer_sum(memory: Memory) -> None:
    """Checks sums that do not fill the last program's block."""
    OneOfRanks(3, 1).assert_sums(torch.float32, 520, memory.put)
    memory.assert_surroundings_untouched()
