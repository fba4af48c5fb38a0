"""Kernels of other projects, from the folders that OTHER_KERNELS names, as gfx942 and gfx950 machine code."""

from collections.abc import Callable

import pytest

from rocm_lab.simulator.launcher import ARCHS
from tests.amd.simulator.other_kernels import CASES, Run, run_case


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_kernel_of_another_project_gives_the_right_result(case: Callable[[Run], None], arch: str) -> None:
    for report, _ in run_case(case, arch):
        assert not report.faults
        assert report.instructions > 0
