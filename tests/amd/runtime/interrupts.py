"""KeyboardInterrupt at any line of this project, or no memory at any operation of torch, one at a time."""

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.amd.house.source_tree import ROOT

_OURS = tuple(f"{ROOT / folder}/" for folder in ("rocm_attn", "rocm_serve", "kernels", "hip_graphs"))


def interrupted_at(number: int, call: Callable[[], object]) -> bool:
    """Calls, with KeyboardInterrupt before the line of this number that runs, counted from 1. True if that many ran."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        if event == "line":
            lines += 1
            if lines == number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    gc.disable()  # objects of earlier tests would be finalized in here, where no interrupt gets out
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        assert lines == number
        return True
    finally:
        sys.settrace(before)
        gc.enable()
    return False


def every_line(call: Callable[[], object], step: int = 1) -> Iterator[int]:
    """Interrupts a call at each of its lines in turn, or at each `step`-th; yields the line's number after each."""
    number = 1
    while interrupted_at(number, call):
        yield number
        number += step


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
