"""Faults from outside: memory that runs out, and Ctrl-C, at a chosen place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rocm_attn

_PACKAGE = Path(rocm_attn.__file__).resolve().parent
# Symlinks lead out of the package to the two lower floors, and a frame names either path.
PROJECT = tuple(
    f"{folder}/" for folder in {str(_PACKAGE), *(str(_PACKAGE.parent / n) for n in ("kernels", "hip_graphs"))}
)


class OutOfMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The n-th operation that makes or writes a tensor raises what torch raises when memory runs out."""

    def __init__(self, n: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = n

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, or raise in its place."""
        if not func.is_view:
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError("out of memory, by the tester")
        return func(*args, **(kwargs or {}))


@contextmanager
def interrupt(n: int) -> Iterator[None]:
    """Raise KeyboardInterrupt at the n-th line of the project's code that runs in this thread from now on."""
    left = n

    def on_line(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt("by the tester")
        return on_line

    def on_call(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        return on_line if left > 0 and frame.f_code.co_filename.startswith(PROJECT) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)
