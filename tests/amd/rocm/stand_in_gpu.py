"""A pytest plugin: an MI300X that is the simulator, for what fits into it: `-p tests.amd.rocm.stand_in_gpu`.

Tests that need a GPU run, with tensors of the CPU; kernels run as machine code of gfx942. Its driver states no figures.
"""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from rocm_attn.cli import env
from rocm_attn.machine import target
from rocm_lab.simulator.launcher import simulated

ARCH = "gfx942"
_UNITS = 304
_DEVICE = {"device": "cuda:0", "name": "a simulated MI300X", "arch": ARCH, "compute_units": _UNITS, "memory_bytes": 0}
_active = ExitStack()


def pytest_sessionstart() -> None:
    """Puts the simulator in place of the GPU, before tests are imported."""
    here = replace(target.target_elsewhere(ARCH), compute_units=_UNITS)
    _active.enter_context(mock.patch.object(target, "detect_target", return_value=here))
    _active.enter_context(mock.patch.object(env, "_devices", return_value=[_DEVICE]))
    _active.enter_context(simulated(ARCH))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Removes the marks that leave tests of a GPU out."""
    for item in items:
        item.own_markers = [mark for mark in item.own_markers if _is_kept(mark)]


def _is_kept(mark: Any) -> bool:
    return not (mark.name == "skip" and mark.kwargs.get("reason") == "needs a GPU")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Ends it, once the report is written."""
    _active.close()
