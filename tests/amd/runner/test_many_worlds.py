"""More random worlds of the scheduler than every run has time for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

from tests.amd.runner import test_scheduler


@pytest.mark.nightly
@test_scheduler.worlds
@settings(max_examples=1000)
def test_every_request_comes_to_what_it_would_alone(**world: Any) -> None:
    test_scheduler.test_every_request_comes_to_what_it_would_alone.hypothesis.inner_test(**world)  # type: ignore[attr-defined]
