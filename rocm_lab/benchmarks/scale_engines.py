"""Engines that serve requests, as events in time: queues, steps, KV that runs out, KV that moves to other GPUs.

Each engine runs one step after the other, like the project's own: all sequences that decode, and chunks of the oldest
prompts, up to its token limit. A request is admitted when its prompt and its whole answer fit the free KV, first come
first served. A request goes to the engine that has the fewest tokens to do.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rocm_lab.benchmarks.scale_nodes import NodeStep


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """A request on its way. Times in seconds.

    tokens:     when each token of the answer came, the first one from the prompt's last chunk
    prefilled:  tokens of the prompt that have been computed
    """

    arrival: float
    prompt: int
    output: int
    prefilled: int = 0
    tokens: list[float] = field(default_factory=list)

    @property
    def kv_len(self) -> int:
        """Tokens whose K and V are stored."""
        return self.prefilled + max(0, len(self.tokens) - 1)

    @property
    def is_done(self) -> bool:
        """True if it has its answer."""
        return len(self.tokens) == self.output


class EventQueue:
    """Events in the order of their times; events of equal times run in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Calls event after that many seconds."""
        heapq.heappush(self._events, (self.now + seconds, next(self._number), event))

    def run(self) -> None:
        """Runs until no event is left."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()


@dataclass(frozen=True, slots=True)
class EngineKind:
    """The parameters of an engine.

    step:      seconds of a NodeStep
    kv_tokens: tokens of KV that it holds
    max_seqs:  sequences that run at a time
    max_step:  most tokens of a step
    max_chunk: most tokens of a prompt in a step
    """

    step: Callable[[NodeStep], float]
    kv_tokens: int
    max_seqs: int = 256
    max_step: int = 2048
    max_chunk: int = 2048


class SimulatedEngine:
    """One engine, which serves its jobs to their end."""

    def __init__(self, clock: EventQueue, kind: EngineKind) -> None:
        self.kind, self._clock = kind, clock
        self.waiting: deque[SimulatedJob] = deque()
        self.running: list[SimulatedJob] = []
        self.free = kind.kv_tokens
        self.num_steps = 0
        self._is_stepping = False

    @property
    def to_do(self) -> int:
        """Tokens of its jobs that are not computed."""
        jobs = itertools.chain(self.waiting, self.running)
        return sum(job.prompt - job.prefilled + job.output - len(job.tokens) for job in jobs)

    def give(self, job: SimulatedJob) -> None:
        """Adds a new job. Raises ValueError for one that can never fit."""
        if job.prompt + job.output > self.kind.kv_tokens:
            raise ValueError(f"a job of {job.prompt} + {job.output} tokens; the engine holds {self.kind.kv_tokens}")
        self.waiting.append(job)
        self._begin()

    def _begin(self) -> None:
        if self._is_stepping:
            return
        while self.waiting and len(self.running) < self.kind.max_seqs:
            need = self.waiting[0].prompt + self.waiting[0].output
            if need > self.free:
                break
            self.free -= need
            self.running.append(self.waiting.popleft())
        if not self.running:
            return
        decodes = [job for job in self.running if job.tokens]
        chunks = self._chunks(self.kind.max_step - len(decodes))
        mean = sum(job.kv_len for job in decodes) // len(decodes) if decodes else 0
        batch = NodeStep(len(decodes), mean + 1, tuple((new, job.prefilled) for job, new in chunks))
        self._is_stepping = True
        self._clock.after(self.kind.step(batch), lambda: self._end(decodes, chunks))

    def _chunks(self, tokens: int) -> list[tuple[SimulatedJob, int]]:
        found = []
        for job in self.running:
            if not job.tokens and tokens > 0:
                new = min(job.prompt - job.prefilled, tokens, self.kind.max_chunk)
                tokens -= new
                found.append((job, new))
        return found

    def _end(self, decodes: Sequence[SimulatedJob], chunks: Sequence[tuple[SimulatedJob, int]]) -> None:
        self._is_stepping = False
        self.num_steps += 1
        for job in decodes:
            job.tokens.append(self._clock.now)
        for job, new in chunks:
            job.prefilled += new
            if job.prefilled == job.prompt:
                job.tokens.append(self._clock.now)
        gone = [job for job in self.running if self._ends_here(job)]
        self.running = [job for job in self.running if not self._ends_here(job)]
        for job in gone:
            self.free += job.prompt + job.output
            self._let_go(job)
        self._begin()

    def _ends_here(self, job: SimulatedJob) -> bool:
        return job.is_done

    def _let_go(self, job: SimulatedJob) -> None:
        """Removes a job that has ended here."""


def give_to_least(engines: Sequence[SimulatedEngine], job: SimulatedJob) -> None:
    """Gives a job to the engine with the fewest tokens to do."""
    min(engines, key=lambda engine: engine.to_do).give(job)


class Link:
    """Carries the KV of one job after the other to engines that decode."""

    def __init__(
        self, clock: EventQueue, seconds_of: Callable[[SimulatedJob], float], engines: Sequence[SimulatedEngine]
    ) -> None:
        self._clock, self._seconds_of, self._engines = clock, seconds_of, engines
        self._free_at = 0.0

    def carry(self, job: SimulatedJob) -> None:
        """Carries a job that has its first token."""
        self._free_at = max(self._free_at, self._clock.now) + self._seconds_of(job)
        self._clock.after(self._free_at - self._clock.now, lambda: give_to_least(self._engines, job))


class PrefillEngine(SimulatedEngine):
    """An engine that computes prompts and their first tokens; a link carries the resulting KV."""

    def __init__(self, clock: EventQueue, kind: EngineKind, link: Link) -> None:
        super().__init__(clock, kind)
        self._link = link

    def _ends_here(self, job: SimulatedJob) -> bool:
        return bool(job.tokens)

    def _let_go(self, job: SimulatedJob) -> None:
        if not job.is_done:
            self._link.carry(job)


@dataclass(frozen=True, slots=True)
class Cluster:
    """num_whole engines that serve requests whole, or num_prefill that begin them and num_decode that continue them.

    kind:     of engines that decode
    prefill:  of those that only begin requests
    transfer: seconds for the KV of a job from a prefill engine to a decode engine
    """

    kind: EngineKind
    prefill: EngineKind
    num_whole: int = 0
    num_prefill: int = 0
    num_decode: int = 0
    transfer: Callable[[SimulatedJob], float] = lambda job: 0.0

    def serve(self, jobs: Sequence[SimulatedJob]) -> list[SimulatedEngine]:
        """Runs until every job is done; returns the engines in their final state."""
        clock = EventQueue()
        decode = [SimulatedEngine(clock, self.kind) for _ in range(self.num_decode)]
        entry = [SimulatedEngine(clock, self.kind) for _ in range(self.num_whole)]
        for _ in range(self.num_prefill):  # a link for each: the NICs of its GPUs
            entry.append(PrefillEngine(clock, self.prefill, Link(clock, self.transfer, decode)))
        for job in jobs:
            clock.after(job.arrival, lambda job=job: give_to_least(entry, job))  # type: ignore[misc]
        clock.run()
        return [*entry, *decode]


def gaps(jobs: Sequence[SimulatedJob]) -> Iterator[float]:
    """Yields the seconds between tokens of the same answer."""
    for job in jobs:
        for before, after in itertools.pairwise(job.tokens):
            yield after - before
