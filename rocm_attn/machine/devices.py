"""The device that is meant, the device that launches go to, and the order of launches on its streams."""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from rocm_attn.errors import BadSetting, BadTensor


def device_of(device: torch.device | str) -> torch.device:
    """The device of a name; the CPU has no index, as its tensors have none. Raises BadSetting for an unknown name."""
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise BadSetting(
            f"device {device!r} is not known; use 'cpu', 'cuda' or 'cuda:1' (HIP devices are 'cuda' in torch)"
        ) from error
    return torch.device("cpu") if named.type == "cpu" else named


def require_there(device: torch.device) -> None:
    """Raises BadSetting for a device that is neither a CPU nor a GPU which torch sees."""
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadSetting(
            f"device {str(device)!r} does not exist: torch sees {torch.cuda.device_count()} GPUs; use 'cpu'"
        )
    if device.type not in ("cpu", "cuda"):
        raise BadSetting(f"device {str(device)!r} is not served; use 'cpu' or 'cuda' (HIP devices are 'cuda' in torch)")


def with_index(device: torch.device | str) -> torch.device:
    """Turns cuda into cuda:N, so that the device compares equal to those of tensors. Raises BadSetting."""
    device = device_of(device)
    if device.type == "cuda" and device.index is None:
        require_there(device)
        return torch.device("cuda", torch.cuda.current_device())
    return device


_HERE: AbstractContextManager[object] = nullcontext()
# Functions of torch._C, looked up once: the public ones cost too much for a step. A torch for CPUs has none.
_current_index: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: -1)


def is_current(device: torch.device) -> bool:
    """True if launches go to the device without a change of the current device."""
    # A CPU has no index, which is cheaper to check than its type.
    index = device.index
    return index is None or _current_index() == index


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which launches go to the device, even if another one is current for the caller."""
    if is_current(device):
        return _HERE
    return torch.cuda.device(device)


def require_tensor(name: str, value: object) -> None:
    """Raises BadTensor for a value that is no tensor."""
    if not isinstance(value, torch.Tensor):
        raise BadTensor(f"{name} is a {type(value).__name__}; give a tensor on the device")


def memory_of(device: torch.device) -> int:
    """Bytes that tensors may still take: of a GPU's memory what is free, or kept by torch's allocator; of a CPU's all.

    Tensors of the meta device take none.
    """
    if device.type == "meta":
        return sys.maxsize
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def wait_for_device(device: torch.device) -> None:
    """Waits until everything that was launched on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Streams:
    """The stream functions of a device: here, those of a CPU, on which kernels run before their launch returns."""

    def current_handle(self) -> int:
        """A number that identifies the current stream."""
        return -1

    def current(self) -> Any:
        """The current stream; wait_stream(other) makes it wait for everything that was launched on the other."""
        raise AssertionError("a CPU has one order of work")

    def is_capturing(self) -> bool:
        """True if launches on the current stream are captured."""
        return False


class _DeviceStreams(Streams):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.current_handle = partial(_current_stream, device.index)  # type: ignore[method-assign]

    def current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


class StreamOrder:
    """The order of steps that use the same buffers and pages and may run on different streams.

    streams: those of the device; tests pass their own
    """

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        if streams is None:
            streams = Streams() if device.type == "cpu" else _DeviceStreams(device)
        self._streams = streams
        self._last: Any = None
        self._last_handle = -1
        self._others: dict[int, Any] = {}

    def follow(self) -> None:
        """Begins a step: later launches on the current stream start after the step before.

        This holds for any streams on which that step was launched.
        """
        handle = self._streams.current_handle()
        if handle != self._last_handle or self._others:
            stream = self._streams.current()
            for other in (self._last, *self._others.values()):
                if other is not None:
                    stream.wait_stream(other)
            self._last, self._last_handle, self._others = stream, handle, {}

    def join(self) -> None:
        """Orders a launch of the step on the current stream: it starts after the launches that began the step.

        A stream waits once per step. Two streams of one step are ordered by the code that forks and joins them; a
        capture's own stream is ordered by the recorder.
        """
        handle = self._streams.current_handle()
        if handle != self._last_handle and handle not in self._others and not self._streams.is_capturing():
            stream = self._streams.current()
            stream.wait_stream(self._last)
            self._others[handle] = stream
