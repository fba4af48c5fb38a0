"""What these tests share: numbers that go into the report."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """measured(name, value) puts a value into the report; report.py writes it. The value must be known to JSON."""
    return record_property
