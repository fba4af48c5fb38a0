"""Collects only tests without a checkout if AITER_SOURCE is unset, else those that this process can run."""

import os

from tests.amd.aiter_source.checkout import VARIABLE
from tests.amd.aiter_source.engines import IS_INTERPRETED

_OF_A_CHECKOUT = {"test_simulated.py", "test_interpreted.py", "test_parameters.py", "test_marks.py"}
_HERE = {"test_interpreted.py"} if IS_INTERPRETED else _OF_A_CHECKOUT - {"test_interpreted.py"}

collect_ignore = sorted(_OF_A_CHECKOUT - _HERE if os.environ.get(VARIABLE) else _OF_A_CHECKOUT)


def pytest_report_header() -> str:
    if os.environ.get(VARIABLE):
        return f"AITER: {os.environ[VARIABLE]}"
    return f"AITER: {VARIABLE} names no checkout, so {', '.join(collect_ignore)} are not collected"
