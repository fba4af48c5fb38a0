"""The contract of every recorder, for recordings that a device replays and those that the host replays."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol, TypeVar

from rocm_attn.hip_graphs.errors import RecordingRefused

T = TypeVar("T")


class Recording(Protocol):
    """A function's device work, frozen: the same operations, scalars and addresses on every replay."""

    @property
    def bytes(self) -> int:
        """The number of bytes by which the recorder's memory pool grew for this recording."""

    def replay(self) -> None:
        """Does the recorded work once more, on the current contents of the recorded addresses."""


class Recorder(Protocol):
    """Makes recordings that share one memory pool.

    Because the pool is shared, replay one recording at a time. A replay may overwrite the intermediates of others, and
    the results of those that were made after it: use results, or copy them, before an earlier recording is replayed.
    Later ones do not touch the results of fn as long as its recording lives.
    """

    def record(self, fn: Callable[[], T]) -> tuple[Recording, T]:
        """Runs fn to warm it up, then records it once.

        fn: device work under torch.no_grad(). It runs several times, so it must give the same work each time, and
        tensors that it updates in place have advanced by some runs afterwards (by equally many for every recorder).
        Returns the recording and the result of fn in the recorded run: tensors at fixed addresses, which hold garbage
        until the first replay and are rewritten by each one.
        Raises RecordingRefused if fn requests work that cannot be replayed; the recorder can be used again then.
        """

    def release_memory(self) -> None:
        """Frees the memory of recordings that were dropped. No replay may be in flight."""


class GraphRecorder(Recorder, Protocol):
    """A recorder for callers that keep their own graphs."""

    def capture(self) -> AbstractContextManager[Recording]:
        """Records a block, once, as torch.cuda.graph does; for callers that keep their own graphs.

            with recorder.capture() as graph:
                out = forward(x)
            x.copy_(next_x)
            graph.replay()

        Run the same work before, to warm up: capture does not. Results of the block hold garbage until the first
        replay, which is refused before the block has ended. On a CPU the block runs while it is recorded, so tensors
        that it updates in place have advanced by a run; on a GPU they have not. Keep every tensor that the block reads
        or makes, and that is needed, as long as the recording is replayed.
        Raises RecordingRefused out of the block if it requests work that cannot be replayed; the recorder can be used
        again then, and the recording cannot.
        """


def refuse_unfinished() -> None:
    """Replaces a replay before the block of a capture has ended. Raises RecordingRefused."""
    raise RecordingRefused(
        "the block of this capture has not ended, or was refused; replay a recording after its block, and record "
        "again after a refusal"
    )


class CountedRecording:
    """A recording with counted replays. run: gets the function that replays it, and calls it once"""

    def __init__(self, recording: Recording, run: Callable[[Callable[[], object]], None]) -> None:
        self.recording, self._run = recording, run
        self.bytes = recording.bytes
        self.replay = partial(run, recording.replay)
