"""Collects the kernels of other projects only where OTHER_KERNELS says which folders have them."""

import os

from tests.amd.simulator.other_kernels import VARIABLE

collect_ignore = [] if os.environ.get(VARIABLE) else ["test_other_kernels.py"]


def pytest_report_header() -> str:
    if os.environ.get(VARIABLE):
        return f"kernels of other projects: {os.environ[VARIABLE]}"
    return f"kernels of other projects: {VARIABLE} names no folder, so {collect_ignore[0]} is not collected"
