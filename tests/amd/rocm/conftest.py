"""A fixture that these tests share: numbers that go into the report."""

from collections.abc import Callable

import pytest


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """measured(name, value) puts a value into the report, which report.py writes. JSON must support the value."""
    return record_property
