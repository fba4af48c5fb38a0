"""Which device is meant, which one launches go to, and in which order on its streams."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch


def with_index(device: torch.device | str) -> torch.device:
    """cuda -> cuda:N, so that the device compares equal to those of tensors."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


_HERE: AbstractContextManager[object] = nullcontext()
# Of torch._C, and looked up once: the public functions cost more than a step has to spend. A torch for CPUs has none.
_current_index: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: -1)


def is_current(device: torch.device) -> bool:
    """Whether launches go to the device anyway."""
    # A CPU has no index, which is cheaper to ask for than its type.
    index = device.index
    return index is None or _current_index() == index


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Launches go to the device, whichever is current for the caller."""
    if is_current(device):
        return _HERE
    return torch.cuda.device(device)


def wait_for_device(device: torch.device) -> None:
    """Wait until all is done that was launched on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Streams(Protocol):
    """What a device has of streams."""

    def current_handle(self) -> int:
        """A number that only the current stream has."""
        ...

    def current(self) -> Any:
        """The current stream; wait_stream(other) lets it go on when all that was launched on the other is done."""
        ...

    def is_capturing(self) -> bool:
        """Whether what is launched on the current stream is captured."""
        ...


class _NoStreams:
    """A CPU's: kernels run before their launch returns."""

    def current_handle(self) -> int:
        return -1

    def current(self) -> Any:
        raise AssertionError("a CPU has one order of work")

    def is_capturing(self) -> bool:
        return False


class _DeviceStreams:
    """A GPU's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.current_handle: Callable[[], int] = partial(_current_stream, device.index)

    def current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


class StreamOrder:
    """The order of steps that use the same buffers and pages and may come on different streams.

    streams: the device's; a test gives its own
    """

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        if streams is None:
            streams = _NoStreams() if device.type == "cpu" else _DeviceStreams(device)
        self._streams = streams
        self._last: Any = None
        self._last_handle = -1
        self._others: dict[int, Any] = {}

    def follow(self) -> None:
        """A step begins: what is launched on the current stream from now on starts after the one before.

        Whatever streams that one's launches came on.
        """
        handle = self._streams.current_handle()
        if handle != self._last_handle or self._others:
            stream = self._streams.current()
            for other in (self._last, *self._others.values()):
                if other is not None:
                    stream.wait_stream(other)
            self._last, self._last_handle, self._others = stream, handle, {}

    def join(self) -> None:
        """Something of the step is launched on the current stream: it starts after what began the step.

        A stream waits once a step. Two streams of one step are ordered by the code that forks and joins them; a
        capture's own stream is ordered by the recorder.
        """
        handle = self._streams.current_handle()
        if handle != self._last_handle and handle not in self._others and not self._streams.is_capturing():
            stream = self._streams.current()
            stream.wait_stream(self._last)
            self._others[handle] = stream
