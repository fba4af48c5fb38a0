"""Fixtures and settings of all tests: a device, no deadline, and memory that is NaN until it is written."""

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator

import pytest

from tests.amd.ending import note_end

# isort: split
import torch
from hypothesis import HealthCheck, settings

from tests.amd import forked
from tests.amd.fast import leave_to_the_night, of_shard
from tests.amd.quick_interpreter import make_quick
from tests.amd.worlds.problems import providers

# Tests do not depend on tuning results measured on this machine.
os.environ["ROCM_ATTN_TUNING"] = "off"

# torch.empty() then gives NaN (or the largest integer), so that a test notices reads of unwritten memory.
torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
# On a GPU some operations have no deterministic form (cumsum); pyproject.toml names that warning as an exception.
# Not use_deterministic_algorithms(), which imports torch's compiler: more than a second of every process.
torch.set_deterministic_debug_mode("warn" if torch.cuda.is_available() else "error")

# The time of an example shows how busy the machine is, not whether the example is right.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

if os.environ.get("TRITON_INTERPRET") == "1":
    make_quick()

# Imported and collected objects stay to the end, so the garbage collector need not scan them.
gc.disable()
# Triton's interpreter makes several objects for each operation. With Python's 700 it looks for cycles among them for a
# twelfth of its time.
gc.set_threshold(20_000, 10, 10)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        leave_to_the_night(items)  # on a GPU all of them take seconds
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    if shard := os.environ.get("SHARD"):
        mine = of_shard(items, shard)
        config.hook.pytest_deselected(items=[item for item in items if item not in mine])
        items[:] = mine


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    note_end(session)


@pytest.fixture
def heard() -> Iterator[None]:
    """SIGINT is not ignored, as it is in a shell's job in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def torch_is_imported() -> Iterator[None]:
    """Processes and ranks begin with torch; those of tests/amd/server/load and of docs/tensor_parallel.md import it."""
    context = forked.context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda _: context)
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Returns a GPU if there is one, else the CPU."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def kernel_device(device: torch.device) -> torch.device:
    """Returns the device of Triton kernels: a GPU, or the CPU under Triton's interpreter."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("without a GPU these tests need TRITON_INTERPRET=1 in the environment")
    return device


# A module's, as Hypothesis allows no fixture of each test.
@pytest.fixture(scope="module", params=providers())
def provider(request: pytest.FixtureRequest) -> str:
    """Returns each provider that can run here in turn."""
    return str(request.param)


@pytest.fixture(scope="module", params=[False, True], ids=["eager", "graphed"])
def graphs(request: pytest.FixtureRequest) -> bool:
    """Returns whether steps run through graphs: both in turn."""
    return bool(request.param)
