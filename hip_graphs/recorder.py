"""What every recorder promises, whether a device replays the recording or the host does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol, TypeVar

from rocm_attn.hip_graphs.errors import RecordingRefused

T = TypeVar("T")


class Recording(Protocol):
    """A function's device work, frozen: the same operations, scalars and addresses on every replay."""

    @property
    def bytes(self) -> int:
        """By how much the recorder's memory pool grew for this recording."""
        ...

    def replay(self) -> None:
        """Does the recorded work once more, reading whatever the recorded addresses hold now."""
        ...


class Recorder(Protocol):
    """Makes recordings that share one memory pool.

    Because the pool is shared, replaying one recording may overwrite the intermediates of another: replay one at a
    time, in one order. What fn returned stays untouched by other recordings for as long as its recording lives.
    """

    def record(self, fn: Callable[[], T]) -> tuple[Recording, T]:
        """Runs fn to warm it up, then records it once.

        fn: device work under torch.no_grad(). It runs several times, so it must give the same work each time, and
        whatever it updates in place has advanced by some runs afterwards (by equally many for every recorder).
        Returns the recording and what fn returned while it was recorded: tensors that live at fixed addresses, hold
        garbage until the first replay and are rewritten by each one.
        Raises RecordingRefused where fn asks for what cannot be replayed; the recorder can be used again then.
        """
        ...

    def release_memory(self) -> None:
        """Gives back the memory of recordings that were dropped. No replay may be in flight."""
        ...


class GraphRecorder(Recorder, Protocol):
    """A recorder for those who keep graphs of their own."""

    def capture(self) -> AbstractContextManager[Recording]:
        """Records what a block does, once, as torch.cuda.graph does; for those who keep graphs of their own.

            with recorder.capture() as graph:
                out = forward(x)
            x.copy_(next_x)
            graph.replay()

        Run the same before, to warm up: nothing is here. What the block makes holds garbage until the first replay,
        which is refused before the block has ended. Keep every tensor that the block reads or makes and that is
        wanted for as long as the recording is replayed.
        Raises RecordingRefused out of the block where it asks for what cannot be replayed; the recorder can be used
        again then, and the recording cannot.
        """
        ...


def refuse_unfinished() -> None:
    """In the place of a replay, before the block of a capture has ended. Raises RecordingRefused."""
    raise RecordingRefused(
        "the block of this capture has not ended, or was refused; replay a recording after its block, and record anew "
        "after a refusal"
    )


class Joiner(Protocol):
    """Makes one recording of several, and recordings of what has run before."""

    def record_launches(self, fn: Callable[[], object]) -> Recording:
        """Records fn without running it, so that nothing of what it writes is written.

        fn: launches of kernels alone, each of which was made before with arguments like these
        Raises RecordingRefused, as Recorder.record.
        """
        ...

    def join(self, recordings: Sequence[Recording]) -> Recording:
        """A recording that does what these do, one after the other: by one launch, where the driver can.

        recordings: of any recorders of the device, as they are; none of them draws random numbers of torch's
        """
        ...


class InTurn:
    """Recordings that are replayed one after the other."""

    bytes = 0

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._recordings = tuple(recordings)

    def replay(self) -> None:
        """As Recording.replay."""
        for recording in self._recordings:
            recording.replay()


class CountedRecording:
    """A recording whose replays somebody counts, those too in which it is a part of another.

    run: is given what replays it, and calls that once
    """

    def __init__(self, recording: Recording, run: Callable[[Callable[[], object]], None]) -> None:
        self.recording, self._run = recording, run
        self.bytes = recording.bytes
        self.replay = partial(run, recording.replay)

    def counts(self, joined: Recording) -> CountedRecording:
        """A recording of which this one is a part."""
        return CountedRecording(joined, self._run)


def uncounted(recording: Recording) -> Recording:
    """A recording, without those who count it."""
    while isinstance(recording, CountedRecording):
        recording = recording.recording
    return recording


def counted_as(parts: Sequence[Recording], joined: Recording) -> Recording:
    """A recording of these parts, whose replays are counted as theirs are.

    joined: what replays them past their counts
    """
    for part in parts:
        if isinstance(part, CountedRecording):
            joined = part.counts(joined)
    return joined
