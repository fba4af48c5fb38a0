"""A pytest plug-in with the fixture `simulate_amd`: a kernel's test runs once for each simulated GPU arch.

It is loaded wherever rocm-lab is installed, so it imports nothing until a test uses the fixture.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes each test that uses `simulate_amd` by the arch."""
    if "simulate_amd" in metafunc.fixturenames:
        from rocm_lab.simulator.launcher import ARCHS

        metafunc.parametrize("simulate_amd", ARCHS, indirect=True)


@pytest.fixture
def simulate_amd(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Returns simulate(kernel, grid, args, **constants) of rocm_lab.simulator.simulate, with the test's arch filled in.

    The test fails at an access outside of the arrays, at a race in LDS, and where the machine code uses a result
    without waiting for it.
    """
    from rocm_lab.simulator import simulate as module

    def run(kernel: Any, grid: Any, args: Sequence[Any] | Mapping[str, Any], **keywords: Any) -> Any:
        report = module.simulate(kernel, grid, args, request.param, **keywords)
        assert not report.faults, "\n".join(report.lines())
        return report

    return run
