"""PlainLaunch: a captured graph launched by the driver itself, where torch's replay would do nothing else.

torch's replay takes about a microsecond beside its launch. It also gives a graph that draws random numbers its seeds
and offsets. Which graphs draw torch does not say, and what a recorder has watched being captured need not be all:
compiled code and extensions ask generators past it. So the first replay is torch's, and is looked at; only a graph for
which it has done nothing but launch is the driver's from then on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode

from rocm_attn.hip_graphs.record_guard import LightDispatchMode

# Whose replays are known to be generators' operations and a launch. Later ones may call back what libraries have
# registered, without a trace that could be looked for.
_LAST_KNOWN_TORCH = 2, 13


class Here(NamedTuple):
    """What of a device is current, by functions that cost less than torch's public ones.

    device_index:   of the device
    current_device: () -> index of the current device
    current_stream: index -> handle of its current stream; 0 is the default one, which nothing can capture
    is_capturing:   () -> whether what is launched on the current stream is captured
    offset:         () -> how far the device's own generator has come; moved by each replay that draws from it
    """

    device_index: int
    current_device: Callable[[], int]
    current_stream: Callable[[int], int]
    is_capturing: Callable[[], bool]
    offset: Callable[[], int]

    @classmethod
    def of(cls, index: int) -> Here:
        """That of a GPU."""
        calls = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream, torch._C._cuda_isCurrentStreamCapturing
        return cls(index, *calls, torch.cuda.default_generators[index].get_offset)


class _Operations(LightDispatchMode):
    """Notes whether torch runs any operation, which of a replay only generators do, for the graph's seeds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.any = False

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.any = True
        return func(*args, **(kwargs or {}))


def is_known(torch_version: str) -> bool:
    """Whether it is known what all a release of torch does to replay a graph."""
    number = re.match(r"(\d+)\.(\d+)", torch_version)
    return number is not None and (int(number[1]), int(number[2])) <= _LAST_KNOWN_TORCH


def only_launches(replay: Callable[[], None], offset: Callable[[], int]) -> bool:
    """Replay a graph by torch, once, and say whether that was a launch and nothing else.

    offset: as in Here; other generators show by their operations alone
    """
    before, operations = offset(), _Operations()
    try:
        with operations:
            replay()
    except BaseException:
        # An interrupt may come before `with` has taken the mode back, which would see all that this thread does next.
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
        "_is_plain",
        "_launch",
        "_offset",
        "_ready",
        "_stream",
        "_was_seen",
    )

    def __init__(self, by_torch: Callable[[], None], launch: Callable[..., int], ready: object, here: Here) -> None:
        self._by_torch, self._launch, self._ready = by_torch, launch, ready
        # Each by itself: it is looked up in every step.
        self._index, self._device, self._stream, self._is_capturing, self._offset = here
        self._was_seen = self._is_plain = False

    @property
    def is_plain(self) -> bool:
        """Whether torch's replay is known to launch the graph and do nothing else."""
        return self._is_plain

    def replay(self) -> None:
        """As Recording.replay, on the stream that is current then."""
        if self._is_plain and self._device() == self._index:
            stream = self._stream(self._index)
            # What torch says of a replay within a capture is torch's to say.
            if (not stream or not self._is_capturing()) and not self._launch(self._ready, stream):
                return
        self._replay_by_torch()

    def _replay_by_torch(self) -> None:
        """While it is not known what that does; and where the driver's launch does not do: torch finds its way, or says
        what is wrong. So it is for another device, in a thread that has used none, after an error."""
        if self._was_seen or self._is_capturing():
            self._by_torch()
            return
        self._was_seen = True  # what raises is not known to be plain
        self._is_plain = only_launches(self._by_torch, self._offset)
