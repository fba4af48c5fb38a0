"""The ways in which a guard's test runs: by each provider, eagerly and in graphs, or in a process of its own."""

from subprocess import CompletedProcess

import pytest

from tests.amd.forked import run_forked
from tests.amd.worlds.problems import providers

# Messages of torch and Triton for a kernel that has left its memory on a GPU.
DEVICE_FAULT = r"an illegal memory access|device-side assert|misaligned address"
# Kernels of this project, and the stand-in for other libraries' kernels.
PROVIDERS = [*providers(), "csr"]


_WAYS: tuple[tuple[str, bool, list[pytest.MarkDecorator]], ...] = (
    ("eager", False, [pytest.mark.nightly]),
    ("graphed", True, []),
)
both_ways = pytest.mark.parametrize("graphs", [pytest.param(on, id=way, marks=marks) for way, on, marks in _WAYS])


def each_way(*names: str) -> pytest.MarkDecorator:
    """Parametrizes a test by these providers, eager and in graphs. Days omit eager steps.

    A guard may matter only in graphs, so `fast` must not leave out the graphs of any provider.
    """
    ways = [pytest.param(name, on, id=f"{name}-{way}", marks=marks) for name in names for way, on, marks in _WAYS]
    return pytest.mark.parametrize(("provider", "graphs"), ways)


in_each_way = each_way(*PROVIDERS)


def run_elsewhere(code: str) -> CompletedProcess[str]:
    """Runs Python code in a separate process: with a guard off, a step on a GPU may fault, which ends its process."""
    code = f"from tests.amd.guards.csr_kernels import put_in_stand_ins\nput_in_stand_ins(setattr)\n{code}"
    return run_forked(code)
