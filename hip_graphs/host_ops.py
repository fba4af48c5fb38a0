"""Operations that are host code around other operations: a recording holds what they run, and not them.

To torch such an operation is one of its own, so that compiled code calls it as it is. A replay must not: host code does
not run again. So a guard that meets one runs its body, and looks at what that does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

_bodies: dict[OpOverload, Callable[..., Any]] = {}


def is_host_code(func: OpOverload, body: Callable[..., Any]) -> None:
    """Say of an operation that all it does is to call body with its arguments."""
    _bodies[func] = body


def body_of(func: OpOverload) -> Callable[..., Any] | None:
    """What was said of an operation; None: it is an operation like others."""
    return _bodies.get(func)
