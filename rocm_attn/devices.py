"""Which device is meant, which one launches go to, and in which order on its streams."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def with_index(device: torch.device) -> torch.device:
    """cuda -> cuda:N, so that the device compares equal to those of tensors."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


_HERE: AbstractContextManager[object] = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Launches go to the device, whichever is current for the caller."""
    # torch._C: the public functions cost more than a step has to spend.
    if device.type == "cpu" or torch._C._cuda_getDevice() == device.index:
        return _HERE
    return torch.cuda.device(device)


class StreamOrder:
    """The order of steps that use the same buffers and pages and may come on different streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None
        self._last_handle = -1

    def follow(self) -> None:
        """What is launched on the current stream from now on starts after the step that followed before."""
        if self._device.type == "cpu":
            return
        handle = torch._C._cuda_getCurrentRawStream(self._device.index)
        if handle != self._last_handle:
            stream = torch.cuda.current_stream(self._device)
            if self._last is not None:
                stream.wait_stream(self._last)
            self._last, self._last_handle = stream, handle
