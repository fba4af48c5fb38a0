"""Calls of a function that a test looks at."""

from typing import Any

import pytest


def noted(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """Returns the arguments of all later calls, without those by name. The calls themselves are as they were."""
    calls, real = list[tuple[Any, ...]](), getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return real(*given, **named)

    patch.setattr(owner, name, call)
    return calls
