"""Registers the stand-ins of csr_kernels.py as providers, and keeps the environment from switching off guards."""

from collections.abc import Iterator

import pytest

from rocm_attn.machine.settings import DEBUG, DISABLE_GUARDS, settings
from tests.amd.guards.csr_kernels import put_in_stand_ins


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds the providers "csr" and "csr_min_1"."""
    put_in_stand_ins(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def fresh_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reads the environment again, without settings until a test makes them."""
    monkeypatch.delenv(DEBUG, raising=False)
    monkeypatch.delenv(DISABLE_GUARDS, raising=False)
    settings.cache_clear()
    yield
    settings.cache_clear()
