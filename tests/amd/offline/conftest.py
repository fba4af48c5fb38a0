"""Compiling touches no memory, so tensors of several GiB cost nothing here."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def untouched_memory() -> Iterator[None]:
    """torch.empty() that does not write: filled with NaN, a KV cache above 2 GiB would be resident."""
    before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]
