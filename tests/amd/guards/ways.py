"""The ways in which a guard's test runs: by each provider, eagerly and in graphs, or in a process of its own."""

from __future__ import annotations

from subprocess import CompletedProcess

import pytest

from tests.amd.forked import run_forked
from tests.amd.worlds.problems import providers

# Messages of torch and Triton for a kernel that has left its memory on a GPU.
DEVICE_FAULT = r"an illegal memory access|device-side assert|misaligned address"
# Kernels of this project, and the stand-in for other libraries' kernels.
PROVIDERS = [*providers(), "csr"]


def each_way(*names: str) -> pytest.MarkDecorator:
    """Parametrizes a test by these providers, eager and in graphs. Days omit only the stand-ins' eager steps.

    A guard may matter only in graphs, so `fast` must not leave out the graphs of any provider.
    """
    return pytest.mark.parametrize(
        ("provider", "graphs"),
        [
            pytest.param(
                name,
                graphs,
                id=f"{name}-{'graphed' if graphs else 'eager'}",
                marks=[pytest.mark.nightly] * (name not in providers() and not graphs),
            )
            for name in names
            for graphs in (False, True)
        ],
    )


in_each_way = each_way(*PROVIDERS)


def run_elsewhere(code: str) -> CompletedProcess[str]:
    """Runs Python code in a separate process: with a guard off, a step on a GPU may fault, which ends its process."""
    code = f"from tests.amd.guards.csr_kernels import put_in_stand_ins\nput_in_stand_ins(setattr)\n{code}"
    return run_forked(code)
