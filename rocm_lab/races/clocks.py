"""The order of what waves do: which of their operations are complete before another one begins, in any run.

A wave's time is cut into segments, by barriers, write backs and invalidations. A clock says for each other wave how
many of its segments happened before. A release and an acquire at agent scope are these instructions in this order; so
has it LLVM's "User Guide for AMDGPU Backend", "Memory Model GFX942":

    release   buffer_wbl2 sc1, s_waitcnt vmcnt(0), then an atomic, or a store with sc1
    acquire   an atomic that returns, or a load with sc1; s_waitcnt vmcnt(0); buffer_inv sc1

Without the write back a store may stay in the L2 of its XCD, and without the invalidation a load may find an older
value there or in the L1. An operation counts as complete when s_waitcnt, or a full counter, has proved it so.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rocm_lab.simulator.watch import Program
from rocm_lab.waits.counters import CAPACITY, Queue, Wait

NEVER = 1 << 60


@dataclass(slots=True, eq=False)
class Operation:
    """An instruction, executed by a wave, that accesses memory or LDS.

    index:      of the instruction
    is_atomic:  atomics, and loads and stores with sc1
    time:       of its issue; all issues and waits of a launch are counted
    segment:    of its wave, at issue
    clock:      of its wave, at issue
    until:      the time at which it is known to be complete
    done:       the segment of its wave that ends after it is known to be complete
    acquires:   the clock that the words hold that it reads, if it is atomic
    """

    wave: TimedWave
    index: int
    queue: Queue
    is_atomic: bool
    time: int
    segment: int
    clock: Clock
    until: int = NEVER
    done: int = NEVER
    acquires: Clock = field(default_factory=dict)

    def is_before(self, later: Operation) -> bool:
        """True if it is complete before a later one begins, in every order of waves and programs.

        Waves of a program share an L1, which serves them in the order of issue: there a barrier is enough, without a
        wait. Another program sees a store only if it was complete before the barrier after which another wave
        releases it (llvm/llvm-project#160501).
        """
        if self.wave is later.wave:
            return True
        share_a_cache = self.wave.program == later.wave.program and self.queue is later.queue is Queue.VECTOR_MEMORY
        return later.clock.get(self.wave, 0) > (self.segment if share_a_cache else self.done)


@dataclass(slots=True, eq=False)
class _WriteBack:
    """A write back in flight, and the clock that releases after it publish."""

    segment: int
    clock: Clock


@dataclass(slots=True, eq=False)
class TimedWave:
    """A wave: its clock, its operations in flight, and what it has published and seen but not acquired yet."""

    program: Program
    number: int
    segment: int = 0
    clock: Clock = field(default_factory=dict)
    published: Clock = field(default_factory=dict)
    seen: Clock = field(default_factory=dict)
    flights: dict[Queue, deque[Operation | _WriteBack]] = field(
        default_factory=lambda: {queue: deque() for queue in Queue}
    )

    def __str__(self) -> str:
        return f"wave {self.number} of program {self.program}"

    def issue(self, operation: Operation, loaded: list[Clock], stored: list[Clock]) -> None:
        """Puts an operation in flight; loaded, stored: the clocks of the words that it accesses, if it is atomic."""
        for word in loaded:
            operation.acquires = joined(operation.acquires, word)
        for word in stored:
            word.update(joined(word, self.published))
        if stored and self.published.get(self) == self.segment:  # a release: waves that acquire it come after it
            operation.done = self.segment - 1
        queue = operation.queue
        self.flights[queue].append(operation)
        self._complete(queue, CAPACITY[queue] or NEVER, operation.time)

    def wait(self, wait: Wait, time: int) -> None:
        """Completes what an s_waitcnt waits for."""
        for queue in Queue:
            left = wait.left(queue)
            if left is not None:
                self._complete(queue, left, time)

    def write_back(self) -> None:
        """A write back at agent scope, which counts in vmcnt."""
        self.flights[Queue.VECTOR_MEMORY].append(_WriteBack(self.segment, {**self.clock, self: self.segment + 1}))
        self.segment += 1

    def invalidate(self) -> None:
        """An invalidation at agent scope: what was seen by now is acquired."""
        self.clock = joined(self.clock, self.seen)
        self.segment += 1

    def end(self, time: int) -> None:
        """Completes everything."""
        self.wait(Wait(0, 0), time)

    def _complete(self, queue: Queue, left: int, time: int) -> None:
        flights, complete = self.flights[queue], []
        while len(flights) > left:
            complete.append(flights.popleft())
        segment = self.segment
        for each in reversed(complete):
            if isinstance(each, _WriteBack):  # what is before it is in memory with it
                segment = each.segment
                self.published = joined(self.published, each.clock)
            else:
                each.until = time
                each.done = min(each.done, segment)
                self.seen = joined(self.seen, each.acquires)


# For each wave, how many of its segments happened before.
Clock = dict[TimedWave, int]


def meet(waves: list[TimedWave]) -> None:
    """The waves of a program meet at a barrier: what each did before it happened before what all do after it."""
    clock: Clock = {}
    for wave in waves:
        clock = joined(clock, {**wave.clock, wave: wave.segment + 1})
    for wave in waves:
        wave.clock = clock
        wave.segment += 1


def joined(a: Clock, b: Clock) -> Clock:
    """All that happened before by one of two clocks."""
    return {**a, **{wave: max(count, a.get(wave, 0)) for wave, count in b.items()}} if b else a
