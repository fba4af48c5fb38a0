"""What every test shares: a device, no deadline, and memory that is NaN until somebody writes it."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.amd.each_value import leave_to_the_night

# What somebody has measured on this machine is no part of what tests judge.
os.environ["ROCM_ATTN_TUNING"] = "off"

# torch.empty() then gives NaN (or the largest integer), so that a test notices a read of what was never written.
torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
# On a GPU some operations have no deterministic form (cumsum); pyproject.toml names that warning as an exception.
# Not use_deterministic_algorithms(), which imports torch's compiler: more than a second of every process.
torch.set_deterministic_debug_mode("warn" if torch.cuda.is_available() else "error")

# How long an example takes says how busy the machine is, not whether the example is right.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# What is imported and collected stays to the end: no search for garbage need look at it, here or in any test.
gc.disable()


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():  # on a GPU all of them take seconds
        leave_to_the_night(items)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    # What a module of C++ keeps is freed before it looks for leaks.
    gc.unfreeze()


if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.amd.interpreted import quicken

    quicken()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """A GPU if there is one, else the CPU."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def kernel_device(device: torch.device) -> torch.device:
    """Where Triton kernels run: a GPU, or the CPU under Triton's interpreter."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("without a GPU these tests need TRITON_INTERPRET=1 in the environment")
    return device
