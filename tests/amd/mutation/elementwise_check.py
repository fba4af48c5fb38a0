"""Checks of the masks of sums with norms, and of gates."""

from __future__ import annotations

import torch

from tests.amd.kernels.elementwise_cases import FORMS, assert_gated, sum_of_rows
from tests.amd.mutation.memory import Memory


def add_norm(memory: Memory) -> None:
    """Checks rows that do not fill a block."""
    sum_of_rows(3, 40, torch.float32).assert_served(memory.put)
    memory.assert_surroundings_untouched()


def gate(memory: Memory) -> None:
    """Checks rows whose halves do not fill a block."""
    for form in FORMS:
        assert_gated(2, 1032, form, torch.float32, put=memory.put)
    memory.assert_surroundings_untouched()
