"""ConstraintChecks: lets only those constraints of clients reach the engine that a separate process could compile."""

import asyncio
from collections.abc import Callable
from functools import partial
from threading import Lock

from rocm_attn.errors import BadRequest, FitsLater
from rocm_serve.text.constraint import Constraint
from rocm_serve.text.constraint_trial import TrialProcess

# The most constraints that are tried at the same time, and that wait for it.
_AT_A_TIME, MOST_WAITING = 2, 64
# The most that are kept as valid: a service asks for the same few again and again.
_MOST_KNOWN = 256


class ConstraintChecks:
    """Tries constraints in processes that are ended if they take too long. No thread of the server's compiles any.

    begin: makes such a process; None if there is no tokenizer, and so no constraint
    """

    def __init__(self, begin: Callable[[], TrialProcess] | None) -> None:
        self._begin = begin
        self._free = asyncio.Semaphore(_AT_A_TIME)
        self._num_waiting = 0
        self._requested: dict[Constraint, asyncio.Future[BadRequest | None]] = {}  # being tried, or waiting for it
        self._known: dict[Constraint, None] = {}  # the most recently used is last
        self._lock = Lock()  # guards the state shared by the threads that wait for processes
        self._idle: list[TrialProcess] = []
        self._busy: set[TrialProcess] = set()
        self._is_closed = False

    async def check(self, constraint: Constraint) -> None:
        """Returns if a constraint can be used.

        Raises BadRequest for another one, and FitsLater if the most constraints that may wait do so already.
        """
        while constraint not in self._known:
            requested = self._requested.get(constraint)
            if requested is None:
                await self._try_for_all(constraint)
                break
            refused = await asyncio.shield(requested)
            if refused is not None:
                raise refused
        self._know(constraint)

    async def _try_for_all(self, constraint: Constraint) -> None:
        """Tries a constraint. Others that ask for it meanwhile get the result, or ask again if this is cancelled."""
        requested = self._requested[constraint] = asyncio.get_running_loop().create_future()
        refused = None
        try:
            await self._try(constraint)
        except BadRequest as error:
            refused = error
            raise
        finally:
            del self._requested[constraint]
            requested.set_result(refused)

    def _know(self, constraint: Constraint) -> None:
        self._known.pop(constraint, None)
        self._known[constraint] = None
        for oldest in list(self._known)[:-_MOST_KNOWN]:
            del self._known[oldest]

    async def _try(self, constraint: Constraint) -> None:
        if self._begin is None:
            raise BadRequest("the model has no tokenizer, which constraints need; leave the constraint out")
        if self._num_waiting >= MOST_WAITING:
            raise FitsLater(
                f"{self._num_waiting} constraints wait to be compiled, which is the limit; send this one again later"
            )
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1
        if constraint in self._known:  # the task that first asked for it was cancelled while it was tried
            self._free.release()
            return
        # The thread keeps the place, because cancelling a task does not end the work in its thread.
        trying = asyncio.ensure_future(asyncio.to_thread(self._try_in, self._begin, constraint))
        trying.add_done_callback(partial(self._end_trying, constraint))
        await asyncio.shield(trying)

    def _end_trying(self, constraint: Constraint, tried: asyncio.Future[None]) -> None:
        """Marks the constraint as valid before it frees the place for another one."""
        if not tried.cancelled() and tried.exception() is None:
            self._know(constraint)
        self._free.release()

    def close(self) -> None:
        """Ends the processes. Tasks that wait for one get BadRequest."""
        with self._lock:
            self._is_closed = True
            for trial in self._busy:
                trial.end()
            for trial in self._idle:
                trial.end()
                trial.close()
            self._idle.clear()

    def _try_in(self, begin: Callable[[], TrialProcess], constraint: Constraint) -> None:
        """Tries a constraint in a thread. Raises BadRequest."""
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

    def _taken(self, begin: Callable[[], TrialProcess]) -> TrialProcess:
        """Returns an idle process, or a new one. Raises BadRequest when the server ends."""
        with self._lock:
            while self._idle and self._idle[-1].has_ended:  # something else has ended it, such as a lack of memory
                self._idle.pop().close()
            idle = self._idle.pop() if self._idle else None
        # A new one reads megabytes when Python has started there. close() does not wait for that.
        trial = idle if idle is not None else begin()
        with self._lock:
            if not self._is_closed:
                self._busy.add(trial)
                return trial
        trial.end()
        trial.close()
        raise BadRequest("the server is shutting down, and checks no more constraints")
