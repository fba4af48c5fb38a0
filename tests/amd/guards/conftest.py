"""The stand-ins of csr_kernels.py are providers here, and the environment switches no safeguard off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rocm_attn.providers import select
from rocm_attn.settings import DEBUG, DISABLE_GUARDS, settings
from tests.amd.guards.csr_kernels import STAND_INS


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Providers "csr" and "csr_min_1"."""
    monkeypatch.setattr(select, "PROVIDER_NAMES", (*select.PROVIDER_NAMES, *STAND_INS))
    rows = {name: provider.rows for name, provider in STAND_INS.items()}
    monkeypatch.setattr(select, "ROWS", {**select.ROWS, **rows})


@pytest.fixture(autouse=True)
def fresh_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment is read anew, and says nothing until a test lets it."""
    monkeypatch.delenv(DEBUG, raising=False)
    monkeypatch.delenv(DISABLE_GUARDS, raising=False)
    settings.cache_clear()
    yield
    settings.cache_clear()
