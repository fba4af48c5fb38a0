"""Job: one HTTP request that asks for text, from its arrival to the last byte of its answer. Jobs: all of them."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rocm_serve.request import Request
from rocm_serve.request_stream import RequestStream
from rocm_serve.server.api_errors import ApiError, deadline_passed

T = TypeVar("T")


class Job:
    """A request's streams in the engine, and the reason if it ends early.

    salt:     of the cached prefixes that it may use
    is_read:  whether its body has come; before that it takes no place
    ended:    the reason for which it was ended, or None
    on_taken: called when the engine has its requests, and its body waits no longer
    """

    def __init__(self, salt: str, deadline_seconds: float, on_taken: Callable[[], None] = lambda: None) -> None:
        self.salt, self.is_read, self._on_taken = salt, False, on_taken
        self.ended: ApiError | None = None
        self._work: asyncio.Task[Any] | None = None
        self._loop = asyncio.get_running_loop()
        self._arrived = self._loop.time()
        self._streams: list[RequestStream] = []
        self._most_tokens: list[int] = []
        self._seconds = deadline_seconds
        self._timer = self._loop.call_at(self._arrived + deadline_seconds, self._expire)

    @property
    def most_tokens(self) -> int:
        """New tokens that the shortest of its requests may still produce; 0 if none is in the engine."""
        left = (most for most, stream in zip(self._most_tokens, self._streams, strict=True) if not stream.has_ended)
        return min(left, default=0)

    @property
    def is_computed(self) -> bool:
        """True if the engine has nothing more to do for it, and only reading is left."""
        return bool(self._streams) and all(stream.has_ended for stream in self._streams)

    @property
    def age(self) -> float:
        """Seconds since it arrived."""
        return self._loop.time() - self._arrived

    def hasten(self, seconds: float) -> None:
        """Sets an earlier deadline, counted from its arrival. A later one than the present one has no effect."""
        if seconds < self._seconds:
            self._seconds = seconds
            self._timer.cancel()
            self._timer = self._loop.call_at(self._arrived + seconds, self._expire)

    def own(self, streams: Sequence[RequestStream], requests: Sequence[Request]) -> None:
        """Adds streams that end with the job. Raises ApiError if it was ended already."""
        self._on_taken()
        self._streams += streams
        self._most_tokens += [request.max_new_tokens for request in requests]
        self.check()

    def check(self) -> None:
        """Raises the reason if the job was ended."""
        if self.ended is not None:
            raise self.ended

    async def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns what work gives that its requests need. Raises ApiError, and cancels it, if the job is ended."""
        self._work = asyncio.ensure_future(work)
        if self.ended is not None:
            self._work.cancel()
        try:
            # No name here holds the task: an error's traceback holds all names, and the task holds its error.
            result: T = await self._work
            return result
        except asyncio.CancelledError:
            self.check()
            raise
        finally:
            self._work = None

    def end(self, why: ApiError) -> None:
        """Ends its requests. Their readers get the reason. The first reason stays."""
        if self.ended is None:
            self.ended = why
            if self._work is not None:
                self._work.cancel()
            for stream in self._streams:
                stream.give_up(why)

    def close(self) -> None:
        """Ends all of its requests in the engine, because no result is needed."""
        self._timer.cancel()
        for stream in self._streams:
            stream.close()

    def _expire(self) -> None:
        self.end(deadline_passed(self._seconds))


class Jobs:
    """All jobs that were taken and whose answers have not been sent to the last byte.

    is_draining: whether no more are taken
    num_read:    jobs whose body has come, including those whose answers only wait to be read
    """

    def __init__(self) -> None:
        self.is_draining, self.num_read = False, 0
        self._jobs: set[Job] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __iter__(self) -> Iterator[Job]:
        return iter(tuple(self._jobs))

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def num_served(self) -> int:
        """The number of jobs that are read and not computed yet: a slow client takes no other's place."""
        return sum(job.is_read and not job.is_computed for job in self._jobs)

    def note_read(self, job: Job) -> None:
        """Notes that the body of a job has come: from now on it takes a place."""
        job.is_read = True
        self.num_read += 1

    @contextmanager
    def taken(self, job: Job) -> Iterator[None]:
        """Returns a context in which the job is one of them. The job is closed at the end."""
        self._jobs.add(job)
        self._is_empty.clear()
        try:
            yield
        finally:
            job.close()
            self._jobs.discard(job)
            self.num_read -= job.is_read
            if not self._jobs:
                self._is_empty.set()

    def end_all(self, why: ApiError) -> None:
        """Ends all of them."""
        for job in self:
            job.end(why)

    async def empty(self) -> None:
        """Waits until there is none."""
        await self._is_empty.wait()
