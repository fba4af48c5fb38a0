"""A plug-in of pytest: the fixture `simulate_amd`, with which a test of a kernel runs once for each simulated GPU.

It is loaded wherever rocm-lab is installed, so nothing is imported before a test asks for the fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs each test that asks for `simulate_amd` on every arch."""
    if "simulate_amd" in metafunc.fixturenames:
        from rocm_lab.simulator.launcher import ARCHS

        metafunc.parametrize("simulate_amd", ARCHS, indirect=True)


@pytest.fixture
def simulate_amd(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """simulate_amd(kernel, grid, args, **constants), as in rocm_lab.simulator.simulate; the test's arch is filled in.

    The test fails at an access outside of the arrays and at a race in LDS; and where the machine code does not wait
    for what it uses.
    """
    from rocm_lab.simulator import simulate as module

    def run(kernel: Any, grid: Any, args: Sequence[Any] | Mapping[str, Any], **keywords: Any) -> Any:
        report = module.simulate(kernel, grid, args, request.param, **keywords)
        assert not report.faults, "\n".join(report.lines())
        return report

    return run
