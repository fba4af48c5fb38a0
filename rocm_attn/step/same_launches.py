"""SameLaunches: a launcher that is called over and over with the same tensors, put together once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from rocm_attn.hip_graphs.tensor_trees import tensors_in
from rocm_attn.kernels.launch import does_only_launch, is_observed, note_launches
from rocm_attn.step.prepared import Launches, PreparedCall, current_stream, prepare

# No stream has this handle.
_NEVER: tuple[int, Launches] = (-1, ())


class SameLaunches:
    """A launcher with its arguments. A call launches what the launcher does with them.

    The first two calls are the launcher's own, and the second one notes what is launched; those after it hand that to
    the driver: nothing is looked at, and no tensor is asked where it lies. So the tensors must stay as they are, and
    what they hold may change. A launcher that does more than to launch, or launches on no GPU, is called each time.

    stream:    gives the handle of the current stream; None: there is none, as on a CPU
    launcher:  one of only_launches(), if its launches are to be kept
    arguments: its own; tensors on the device, or in pinned memory of the host
    """

    __slots__ = ("_made", "_owned", "_prepared", "_stream", "_was_called", "launcher")

    def __init__(
        self,
        stream: Callable[[], int] | None,
        launcher: Callable[..., object],
        *arguments: object,
        **options: object,
    ) -> None:
        self.launcher = partial(launcher, *arguments, **options)
        self._owned = frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors_in(arguments))
        self._stream = stream if does_only_launch(launcher) else None
        self._was_called = False
        self._prepared: PreparedCall | None = None
        self._made = _NEVER

    def __call__(self) -> None:
        """Launch on the current stream."""
        if self._stream is None or self._prepared is None or is_observed():
            self._call_whole()
            return
        stream = self._stream()
        if self._made[0] != stream:
            self._made = stream, self._prepared.launches(stream, ())
        for run, arguments in self._made[1]:
            run(*arguments)

    def _call_whole(self) -> None:
        if self._stream is None or not self._was_called or is_observed():
            self._was_called = True
            self.launcher()
            return
        with note_launches() as notes:
            self.launcher()
        self._prepared = prepare(notes.launches, (), self._owned) if notes.is_whole else None
        if self._prepared is None:
            self._stream = None


def stream_of(device: torch.device) -> Callable[[], int] | None:
    """As SameLaunches takes it."""
    return current_stream(device) if device.type == "cuda" else None
