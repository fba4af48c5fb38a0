"""The stand-in, in one release or in each of three, and a place of its own for the verdicts of probes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.amd.aiter.signatures import E4048607, RELEASES, Release
from tests.amd.aiter.stand_in import StandIn, install


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where verdicts are kept while the test runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rocm_attn" / "probes"


@pytest.fixture
def aiter(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The newest release."""
    return install(E4048607, monkeypatch)


@pytest.fixture(params=RELEASES, ids=lambda release: release.version)
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Each release that is served."""
    assert isinstance(request.param, Release)
    return install(request.param, monkeypatch)
