"""FakeRecorder records and replays on the host what a device would capture and replay, for machines without a GPU.

It is wrong where a real recording is wrong: scalars, shapes and addresses are frozen, host code does not run again, and
the results of fn hold garbage until the first replay. It refuses whatever a real capture refuses. It cannot detect one
case: on a CPU a host tensor looks like a device tensor, so a replay sees a change of it that a device would not see.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch

from rocm_attn.hip_graphs.collectives import waited_for
from rocm_attn.hip_graphs.frozen_ops import Replayed
from rocm_attn.hip_graphs.host_pool import HostPool
from rocm_attn.hip_graphs.record_guard import RecordGuard, refuse_nested
from rocm_attn.hip_graphs.recorder import refuse_unfinished
from rocm_attn.hip_graphs.tape import Tape, Thunk, require_unmoved
from rocm_attn.hip_graphs.tensor_trees import map_tensors

T = TypeVar("T")

ObserveLaunches = Callable[[Callable[[Thunk], None]], AbstractContextManager[None]]


class FakeRecording:
    """Operations and launches with fixed scalars and addresses."""

    def __init__(self, operations: list[Replayed], storages: dict[int, Callable[[], int]]) -> None:
        self.bytes = 0
        self._operations = operations
        self._storages = storages
        self._is_whole = False
        self._kept: object = None

    def finish(self, num_bytes: int) -> None:
        self.bytes, self._is_whole = num_bytes, True

    def keep(self, kept: object) -> None:
        """Keeps a reference to the object that it was recorded from."""
        self._kept = kept

    def replay(self) -> None:
        """Repeats every operation, in order, into the memory that it was recorded in. Raises StaleRecording."""
        if not self._is_whole:
            refuse_unfinished()
        require_unmoved(self._storages)
        with torch.inference_mode():
            for operation in self._operations:
                operation()


class FakeRecorder:
    """Recorder of functions on CPU tensors.

    observe_launches: a context manager that passes every kernel launch made under it to an observer, as a thunk,
    instead of running it. A kernel launched in another way, and all work of other threads that fn starts, runs while fn
    is recorded and is missing from the replays.
    """

    def __init__(self, observe_launches: ObserveLaunches) -> None:
        self._observe_launches = observe_launches
        self._pool = HostPool()
        self._live: weakref.WeakSet[FakeRecording] = weakref.WeakSet()

    def record(self, fn: Callable[[], T]) -> tuple[FakeRecording, T]:
        """Does the same as `Recorder.record`; fn runs twice."""
        refuse_nested()
        # Lazily made tables and the like must exist before, as on a device, whose first launches load modules.
        with torch.no_grad():
            map_tensors(waited_for, fn())
        with self.capture() as recording:
            outputs = map_tensors(waited_for, fn())
        recording.keep((fn, outputs))
        return recording, outputs

    @contextmanager
    def capture(self) -> Iterator[FakeRecording]:
        refuse_nested()
        tape = Tape(self._pool)
        guard = RecordGuard(torch.device("cpu"), run=tape.run)
        recording = FakeRecording(tape.operations, tape.storages)

        def observe(thunk: Thunk) -> None:
            with guard.lifted():
                tape.note_launch(thunk)

        bytes_before = self._pool.bytes
        with torch.no_grad(), guard, self._observe_launches(observe):
            yield recording
        self._pool.poison_taken()
        recording.finish(self._pool.bytes - bytes_before)
        self._live.add(recording)

    def release_memory(self) -> None:
        """Like `Recorder.release_memory`, but does nothing while a recording lives."""
        if not self._live:
            self._pool = HostPool()
