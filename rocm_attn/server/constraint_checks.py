"""ConstraintChecks: which clients' constraints reach the engine: those that a process of their own could compile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from threading import Lock

from rocm_attn.errors import BadRequest, FitsLater
from rocm_attn.runner.constraint import Constraint
from rocm_attn.runner.constraint_trial import Trial

# Constraints that are tried at the same time, and that wait for it.
_AT_A_TIME, MOST_WAITING = 2, 64
# That are known to be fine: a service asks for the same few again and again.
_MOST_KNOWN = 256


class ConstraintChecks:
    """Tries constraints in processes that are ended where they take too much; no thread of the server's does so.

    begin: makes such a process; None where there is no tokenizer, and so no constraint
    """

    def __init__(self, begin: Callable[[], Trial] | None) -> None:
        self._begin = begin
        self._free = asyncio.Semaphore(_AT_A_TIME)
        self._num_waiting = 0
        self._asked: dict[Constraint, asyncio.Future[BadRequest | None]] = {}  # that are tried, or wait for it
        self._known: dict[Constraint, None] = {}  # the one asked for last at the end
        self._lock = Lock()  # of what the threads share that wait for processes
        self._idle: list[Trial] = []
        self._busy: set[Trial] = set()
        self._is_closed = False

    async def check(self, constraint: Constraint) -> None:
        """Return for a constraint that can be used.

        Raises BadRequest for another one, and FitsLater where as many others wait already as may.
        """
        while constraint not in self._known:
            asked = self._asked.get(constraint)
            if asked is None:
                await self._try_for_all(constraint)
                break
            refused = await asyncio.shield(asked)
            if refused is not None:
                raise refused
        self._know(constraint)

    async def _try_for_all(self, constraint: Constraint) -> None:
        """Those who ask for the same one meanwhile learn what comes of it, or ask again where this one is cancelled."""
        asked = self._asked[constraint] = asyncio.get_running_loop().create_future()
        refused = None
        try:
            await self._try(constraint)
        except BadRequest as error:
            refused = error
            raise
        finally:
            del self._asked[constraint]
            asked.set_result(refused)

    def _know(self, constraint: Constraint) -> None:
        self._known.pop(constraint, None)
        self._known[constraint] = None
        for oldest in list(self._known)[:-_MOST_KNOWN]:
            del self._known[oldest]

    async def _try(self, constraint: Constraint) -> None:
        if self._begin is None:
            raise BadRequest("the model came without a tokenizer, which constraints need; leave the constraint out")
        if self._num_waiting >= MOST_WAITING:
            raise FitsLater(
                f"{self._num_waiting} constraints wait to be compiled, which is the most; send this one again later"
            )
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1
        if constraint in self._known:  # by now: who asked for it first was cancelled while it was tried
            self._free.release()
            return
        # The place is the thread's: a task that is cancelled does not end what runs there.
        trying = asyncio.ensure_future(asyncio.to_thread(self._try_in, self._begin, constraint))
        trying.add_done_callback(partial(self._end_trying, constraint))
        await asyncio.shield(trying)

    def _end_trying(self, constraint: Constraint, tried: asyncio.Future[None]) -> None:
        """It is known to be fine before its place is another one's."""
        if not tried.cancelled() and tried.exception() is None:
            self._know(constraint)
        self._free.release()

    def close(self) -> None:
        """End the processes; who waits for one gets BadRequest."""
        with self._lock:
            self._is_closed = True
            for trial in self._busy:
                trial.end()
            for trial in self._idle:
                trial.end()
                trial.close()
            self._idle.clear()

    def _try_in(self, begin: Callable[[], Trial], constraint: Constraint) -> None:
        """In a thread. Raises BadRequest."""
        trial = self._taken(begin)
        try:
            trial.check(constraint)
        finally:
            with self._lock:
                self._busy.discard(trial)
                if trial.has_ended or self._is_closed:
                    trial.end()
                    trial.close()
                else:
                    self._idle.append(trial)

    def _taken(self, begin: Callable[[], Trial]) -> Trial:
        """A process that is idle, or a new one. Raises BadRequest when the server ends."""
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        # A new one reads megabytes when Python has started there; close() does not wait for that.
        trial = idle if idle is not None else begin()
        with self._lock:
            if not self._is_closed:
                self._busy.add(trial)
                return trial
        trial.end()
        trial.close()
        raise BadRequest("the server ends, and tries no constraint any more")
