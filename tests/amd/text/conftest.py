"""What the text tests need of their process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# On a GPU, cuBLAS is deterministic only so, and tests/amd/conftest.py asks for deterministic operations. It is read
# when the first matrix product runs, which is later than this.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The matrices are small, and threads that wait for each other are slow on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
