"""The stand-in, in one release or in each of three, and a place of its own for the verdicts of probes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocm_attn.selection import probe as kernel_probe
from tests.amd.aiter.signatures import E4048607, RELEASES, Release
from tests.amd.aiter.stand_in import StandIn, install


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where verdicts are kept while the test runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rocm_attn" / "probes"


@pytest.fixture(autouse=True)
def half_a_probe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random rows alone, but in modules that say WHOLE_PROBE, which are about it.

    A key that a binding gets wrong is for the other tests to see: with the probe, another kernel would serve them.
    """
    if not getattr(request.module, "WHOLE_PROBE", False):
        monkeypatch.setattr(kernel_probe, "edge_run", lambda *arguments: None)


@pytest.fixture
def aiter(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The newest release."""
    return install(E4048607, monkeypatch)


@pytest.fixture(params=RELEASES[::-1], ids=lambda release: release.version)
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Each release that is served, the newest first."""
    assert isinstance(request.param, Release)
    return install(request.param, monkeypatch)
