"""Process settings of the text tests."""

import os
from collections.abc import Iterator

import pytest
import torch

from rocm_serve.models.loading import LoadedModel, load_model
from tests.amd.one_thread import computing_in_one_thread

# On a GPU cuBLAS is deterministic only with this setting, and tests/amd/conftest.py requires deterministic operations.
# cuBLAS reads it when the first matrix product runs, which is later than this.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The matrices are small, and threads that wait for each other are slow on a busy machine."""
    with computing_in_one_thread():
        yield


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    """Real weights in float32, which no test changes."""
    return load_model("smollm2", dtype=torch.float32, device=torch.device("cpu"))
