"""GraphCache: key -> recording, with what it returned and the epoch that it is good for."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rocm_attn.hip_graphs.errors import KeyTaken, StaleRecording
from rocm_attn.hip_graphs.pinned import PinnedTensors
from rocm_attn.hip_graphs.recorder import Recording

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """One recording.

    key:     what it is kept under
    outputs: what fn returned while it was recorded; rewritten by each replay
    epoch:   the pinned tensors' epoch that it was recorded in
    """

    key: Hashable
    recording: Recording
    outputs: T
    epoch: int


class GraphCache:
    """The recordings that read one set of pinned tensors.

    A key must hold everything that the recording has frozen: the cache cannot know what that is, but it never lets
    one recording take another's place.
    """

    def __init__(self, pinned: PinnedTensors) -> None:
        self._pinned = pinned
        self._entries: dict[Hashable, Entry[Any]] = {}

    def put(self, key: Hashable, recording: Recording, outputs: T) -> Entry[T]:
        """Keeps a recording that was made in the current epoch. Raises KeyTaken."""
        if key in self._entries:
            raise KeyTaken(
                f"a recording is kept under {key!r} already; a second one means that the key misses something that "
                "the recordings froze: add it to the key, or drop_all() before recording again"
            )
        entry = self._entries[key] = Entry(key, recording, outputs, self._pinned.epoch)
        return entry

    def replay(self, entry: Entry[T]) -> T:
        """Replays a recording and returns its outputs, which stay valid until the next replay of the pool.

        The caller keeps the entry that put() gave, and forgets it when it drops the recording.
        Raises StaleRecording if what the recording reads has moved since.
        """
        if entry.epoch != self._pinned.epoch:  # asked here too, for a call would take longer
            self.require_good(entry)
        entry.recording.replay()
        return entry.outputs

    def require_good(self, entry: Entry[Any]) -> None:
        """Raise StaleRecording if what a recording reads has moved since it was made."""
        if entry.epoch != self._pinned.epoch:
            raise StaleRecording(
                f"the recording under {entry.key!r} is of epoch {entry.epoch} and the tensors it reads are of epoch "
                f"{self._pinned.epoch}: they have moved; drop the recordings and record again"
            )

    def drop(self, key: Hashable) -> None:
        """Forgets a key's recording, if there is one. No replay may be in flight."""
        self._entries.pop(key, None)

    def drop_all(self) -> int:
        """Forgets every recording and returns how many there were. No replay may be in flight.

        The memory goes back when their outputs are no longer held and the recorder's release_memory() is called.
        """
        dropped = len(self._entries)
        self._entries.clear()
        return dropped
