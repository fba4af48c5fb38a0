"""PlainLaunch: the driver itself launches a captured graph if torch's replay would do nothing else.

torch's replay takes about a microsecond in addition to its launch. It also gives seeds and offsets to a graph that
draws random numbers. torch does not report which graphs draw, and a recorder that watches the capture may miss some:
compiled code and extensions call generators without it. So torch does the first replay, which is observed; afterwards
the driver launches only graphs for which torch has done nothing but launch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode

from rocm_attn.hip_graphs.record_guard import LightDispatchMode

# The last release whose replays are known to be generators' operations and a launch. Later ones may call back functions
# that libraries have registered, which leaves no trace to check.
_LAST_KNOWN_TORCH = 2, 13


class Here(NamedTuple):
    """The current state of a device, by functions that cost less than torch's public ones.

    device_index:   of the device
    current_device: () -> index of the current device
    current_stream: index -> handle of its current stream; 0 is the default one, which nothing can capture
    is_capturing:   () -> whether launches on the current stream are captured
    offset:         () -> the offset of the device's own generator; each replay that draws from it moves it
    """

    device_index: int
    current_device: Callable[[], int]
    current_stream: Callable[[int], int]
    is_capturing: Callable[[], bool]
    offset: Callable[[], int]

    @classmethod
    def of(cls, index: int) -> Here:
        """Returns that of a GPU."""
        calls = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream, torch._C._cuda_isCurrentStreamCapturing
        return cls(index, *calls, torch.cuda.default_generators[index].get_offset)


class _Operations(LightDispatchMode):
    """Records whether torch runs any operation; in a replay only generators do, for the graph's seeds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.any = False

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.any = True
        return func(*args, **(kwargs or {}))


def is_known(torch_version: str) -> bool:
    """True if everything that a release of torch does to replay a graph is known."""
    number = re.match(r"(\d+)\.(\d+)", torch_version)
    return number is not None and (int(number[1]), int(number[2])) <= _LAST_KNOWN_TORCH


def only_launches(replay: Callable[[], None], offset: Callable[[], int]) -> bool:
    """Replays a graph by torch, once. Returns true if that was a launch and nothing else.

    offset: as in Here; other generators show only by their operations
    """
    before, operations = offset(), _Operations()
    try:
        with operations:
            replay()
    except BaseException:
        # An interrupt may come before `with` has removed the mode, which would see all later operations of this thread.
        while _get_current_dispatch_mode() is operations:
            _pop_mode()
        raise
    return not operations.any and offset() == before


class PlainLaunch:
    """Replays one graph.

    by_torch: torch's replay, which holds the graph
    launch:   the driver's: graph, stream -> 0, or an error, with which nothing was launched
    ready:    the graph, as launch takes it
    """

    __slots__ = (
        "_by_torch",
        "_device",
        "_index",
        "_is_capturing",
        "_launch",
        "_offset",
        "_ready",
        "_stream",
        "_was_seen",
        "is_plain",
    )

    def __init__(self, by_torch: Callable[[], None], launch: Callable[..., int], ready: object, here: Here) -> None:
        self._by_torch, self._launch, self._ready = by_torch, launch, ready
        # Separate attributes, since every step looks them up.
        self._index, self._device, self._stream, self._is_capturing, self._offset = here
        self._was_seen = self.is_plain = False

    def replay(self) -> None:
        """Does the same as `Recording.replay`, on the stream that is current then."""
        if self.is_plain and self._device() == self._index:
            stream = self._stream(self._index)
            # torch itself handles a replay within a capture.
            if (not stream or not self._is_capturing()) and not self._launch(self._ready, stream):
                return
        self._replay_by_torch()

    def _replay_by_torch(self) -> None:
        """Replays by torch while its effects are unknown, and if the driver's launch fails.

        torch then succeeds or reports the error. This happens for another device, in a thread that has used none, or
        after an error.
        """
        if self._was_seen or self._is_capturing():
            self._by_torch()
            return
        self._was_seen = True  # a replay that raises is not known to be plain
        self.is_plain = only_launches(self._by_torch, self._offset)
