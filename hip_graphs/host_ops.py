"""Operations that are host code around other operations: a recording holds the inner operations, and not them.

To torch such an operation is opaque, so that compiled code calls it unchanged. A replay must not call it: host code
does not run again. So a guard that meets one runs its body, and inspects the operations of the body.
"""

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

_bodies: dict[OpOverload, Callable[..., Any]] = {}


def is_host_code(func: OpOverload, body: Callable[..., Any]) -> None:
    """Registers that an operation does nothing but call body with its arguments."""
    _bodies[func] = body


def body_of(func: OpOverload) -> Callable[..., Any] | None:
    """Returns the registered body of an operation; None for an ordinary operation."""
    return _bodies.get(func)
