"""Compiling touches no memory, so tensors of several GiB cost nothing here."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from typing import cast

import pytest
import torch

from tests.amd.offline.compiling import compile_row
from tests.amd.offline.matrix import Row


@pytest.fixture(scope="package", autouse=True)
def untouched_memory() -> Iterator[None]:
    """torch.empty() that does not write: filled with NaN, a KV cache above 2 GiB would be resident."""
    before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]


@pytest.fixture(scope="package")
def compiled_on_all_cores(request: pytest.FixtureRequest) -> None:
    """Fill Triton's cache with the rows of this run; each test then reads its own from there.

    A row that cannot be compiled fails here in silence, and again in its test.
    """
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    rows = {cast(Row, test.callspec.params["row"]) for test in tests if "compiled_on_all_cores" in test.fixturenames}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        wait([pool.submit(compile_row, row) for row in rows])
