"""Fixtures: the stand-in in one release or in each of three, and a separate folder for the probe's verdicts.

An AITER that is installed, as in the image for CI, is hidden: tests take the stand-in, or none.
"""

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import DistributionFinder, PathDistribution
from pathlib import Path
from types import ModuleType

import pytest

from rocm_attn.selection import probe as kernel_probe
from tests.amd.aiter.signatures import E4048607, RELEASES, Release
from tests.amd.aiter.stand_in import StandIn, install

INSTALLED = importlib.util.find_spec("aiter")


class WithoutAiter(PathFinder):
    """Finds modules and distributions in sys.path, except for the installed AITER."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = super().find_spec(fullname, path, target)
        return None if INSTALLED and found and found.origin == INSTALLED.origin else found

    @classmethod
    def find_distributions(cls, context: DistributionFinder.Context | None = None) -> Iterable[PathDistribution]:
        asked = context or DistributionFinder.Context()
        return () if asked.name == "amd-aiter" else super().find_distributions(asked)


@pytest.fixture(autouse=True)
def without_aiter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the installed AITER. A package of that name in another folder is found."""
    monkeypatch.setattr(sys, "meta_path", [WithoutAiter if each is PathFinder else each for each in sys.meta_path])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder in which verdicts are kept while the test runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rocm_attn" / "probes"


@pytest.fixture(autouse=True)
def half_a_probe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits the probe to random rows, except in tests that use `whole_probe`.

    Other tests must see a key that a binding gets wrong. The whole probe would hide it by choosing another kernel.
    """
    if "whole_probe" not in request.fixturenames:
        monkeypatch.setattr(kernel_probe, "edge_run", lambda *arguments: None)


@pytest.fixture
def whole_probe() -> None:
    """Leaves the probe of a runtime whole."""


@pytest.fixture
def aiter(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Returns the stand-in of the newest release."""
    return install(E4048607, monkeypatch)


@pytest.fixture(params=RELEASES[::-1], ids=lambda release: release.version)
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Returns the stand-in of each supported release, the newest first."""
    assert isinstance(request.param, Release)
    return install(request.param, monkeypatch)
