"""GraphCache: key -> recording, with what it returned and the epoch that it is good for."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rocm_attn.hip_graphs.errors import KeyTaken, NotRecorded, StaleRecording
from rocm_attn.hip_graphs.pinned import PinnedTensors
from rocm_attn.hip_graphs.recorder import Recorder, Recording

T = TypeVar("T")


@dataclass(slots=True)
class Entry(Generic[T]):
    """One recording.

    key:             what it is kept under
    outputs:         what fn returned while it was recorded; rewritten by each replay
    epoch:           the pinned tensors' epoch that it was recorded in
    capture_seconds: wall time of warm-up and recording
    """

    key: Hashable
    recording: Recording
    outputs: T
    epoch: int
    capture_seconds: float
    replays: int = 0


@dataclass(slots=True)
class CacheCounters:
    """captures: recordings put in; replays: done; misses: get() or replay() without a recording; stale: refused."""

    captures: int = 0
    replays: int = 0
    misses: int = 0
    stale: int = 0


class GraphCache:
    """The recordings that read one set of pinned tensors.

    A key must hold everything that the recording has frozen: the cache cannot know what that is, but it never lets
    one recording take another's place.
    """

    def __init__(self, pinned: PinnedTensors) -> None:
        self.counters = CacheCounters()
        self._pinned = pinned
        self._entries: dict[Hashable, Entry[Any]] = {}

    def record(self, key: Hashable, recorder: Recorder, fn: Callable[[], T]) -> Entry[T]:
        """Records fn and keeps it under key.

        Raises KeyTaken before anything runs, StaleRecording if a pinned tensor moves meanwhile, and what the recorder
        raises; nothing is kept then.
        """
        self._require_free(key)
        epoch = self._pinned.epoch
        started = time.perf_counter()
        recording, outputs = recorder.record(fn)
        seconds = time.perf_counter() - started
        if self._pinned.epoch != epoch:
            raise StaleRecording(
                f"pinned tensors moved while {key!r} was recorded (epoch {epoch} became {self._pinned.epoch}); "
                "let buffers grow to their final size before recording"
            )
        return self.put(key, recording, outputs, seconds)

    def put(self, key: Hashable, recording: Recording, outputs: T, capture_seconds: float = 0.0) -> Entry[T]:
        """Keeps a recording that was made in the current epoch. Raises KeyTaken."""
        self._require_free(key)
        entry = Entry(key, recording, outputs, self._pinned.epoch, capture_seconds)
        self._entries[key] = entry
        self.counters.captures += 1
        return entry

    def get(self, key: Hashable) -> Entry[Any] | None:
        """The entry of a key, stale or not, or None."""
        entry = self._entries.get(key)
        if entry is None:
            self.counters.misses += 1
        return entry

    def replay(self, key: Hashable) -> Any:
        """Replays a key's recording and returns its outputs, which stay valid until the next replay of the pool.

        Raises NotRecorded, or StaleRecording if what it reads has moved since.
        """
        entry = self._entries.get(key)
        if entry is None:
            self.counters.misses += 1
            raise NotRecorded(f"nothing is recorded under {key!r}; record it first, or run it without a recording")
        return self.replay_entry(entry)

    def replay_entry(self, entry: Entry[T]) -> T:
        """As replay, for a caller that kept the entry; it must forget it when it calls drop_all()."""
        if entry.epoch != self._pinned.epoch:
            self.counters.stale += 1
            raise StaleRecording(
                f"the recording under {entry.key!r} is of epoch {entry.epoch} and the tensors it reads are of epoch "
                f"{self._pinned.epoch}: they have moved; drop the recordings and record again"
            )
        entry.recording.replay()
        entry.replays += 1
        self.counters.replays += 1
        return entry.outputs

    def drop(self, key: Hashable) -> None:
        """Forgets a key's recording, if there is one. No replay may be in flight."""
        self._entries.pop(key, None)

    def drop_all(self) -> int:
        """Forgets every recording and returns how many there were. No replay may be in flight.

        The memory goes back when nobody holds the outputs any more and the recorder's release_memory() is called.
        """
        dropped = len(self._entries)
        self._entries.clear()
        return dropped

    @property
    def bytes(self) -> int:
        """Bytes by which the kept recordings have grown their recorder's pool."""
        return sum(entry.recording.bytes for entry in self._entries.values())

    @property
    def keys(self) -> tuple[Hashable, ...]:
        return tuple(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def _require_free(self, key: Hashable) -> None:
        if key in self._entries:
            raise KeyTaken(
                f"a recording is kept under {key!r} already; a second one means that the key misses something that "
                "the recordings froze: add it to the key, or drop_all() before recording again"
            )
