"""One thread: the models are tiny, and threads that wait for each other are slow on a busy machine."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def computing_in_one_thread() -> Iterator[None]:
    """Makes torch compute in one thread within the context."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Runs the tests of packages whose conftest imports it in one thread."""
    with computing_in_one_thread():
        yield
