"""The fixtures that all tests here share."""

import pytest

from rocm_serve.models.loading import LoadedModel
from tests.amd.coroutines import pytest_pyfunc_call
from tests.amd.one_thread import one_thread
from tests.amd.server.running import word_model

__all__ = ["loaded", "one_thread", "pytest_pyfunc_call"]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """A model whose tokens are words, unless a file has another one."""
    return word_model()
