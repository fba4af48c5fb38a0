"""The fixtures that all tests here share."""

import pytest

from rocm_serve.models.loading import LoadedModel
from tests.amd.coroutines import pytest_pyfunc_call
from tests.amd.one_thread import one_thread
from tests.amd.runner.tiny_model import tiny_model, with_nan_token

__all__ = ["loaded", "one_thread", "poisoned", "pytest_pyfunc_call"]


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    """The tiny model. A test that changes weights makes its own."""
    return tiny_model()


@pytest.fixture(scope="session")
def poisoned() -> LoadedModel:
    return with_nan_token(tiny_model())
