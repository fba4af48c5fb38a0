"""EngineThread: runs an engine's steps in a thread of its own, and takes commands from other threads.

Commands reach the thread through a queue, in order, and run between two steps. The results of a step go to the owner in
one message. While there is no work, the thread waits for a command.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Concatenate, ParamSpec, Protocol

from rocm_attn.errors import BadRequest, DeviceFault, FitsLater, RocmAttnError, WrongState
from rocm_attn.truth.verdict import TruthVerdict
from rocm_serve.limits import RequestLimits
from rocm_serve.report import Report
from rocm_serve.request import Completion, Event, FinishReason, Request, TokenEvent
from rocm_serve.sampling.logprobs import TokenLogprobs
from rocm_serve.text.constraint import MOST_COMPILING

# Interval at which an idle thread asks whether its owner is still there.
_LOOK_AT_OWNER_SECONDS = 1.0
# Interval at which an idle thread checks whether a request is prepared.
_LOOK_AT_PREPARED_SECONDS = 0.005
# Until there may be memory again for the last message.
_TELL_AGAIN_SECONDS = 0.1
# The threads that serve, by the id() of their engines.
_serving: dict[int, EngineThread] = {}
# Most seconds for preparing a request, which is compiling its constraint.
MOST_PREPARING_SECONDS = 20.0

P = ParamSpec("P")


class ServingEngine(Protocol):
    """The interface of an engine that AsyncEngine can run: Engine, RankedEngine, or your own.

    One thread calls all methods, except report(), which is also called while that thread is in step().
    """

    @property
    def limits(self) -> RequestLimits: ...
    @property
    def has_work(self) -> bool: ...
    def can_prepare(self, request: Request) -> bool: ...
    def is_prepared(self, request: Request) -> bool: ...
    def submit(self, request: Request) -> int: ...
    def step(self) -> Sequence[Event]: ...
    def abort(self, number: int, reason: FinishReason = "abort") -> None: ...
    def cancel(self, number: int) -> None: ...
    def settle(self) -> None: ...
    def probe_truth(self, seed: int) -> TruthVerdict: ...
    def completion(self, number: int) -> Completion: ...
    def report(self) -> Report: ...


@dataclass(slots=True)
class StepOutput:
    """The results of a step, or of several in a row, of all requests together.

    token_ids:   the owner's number of a request (ticket) -> its new tokens; each request in the other two is here too
    logprobs:    of those tokens, if the request asks for them
    completions: of requests that have ended
    """

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    completions: dict[int, Completion] = field(default_factory=dict)

    def add(self, later: StepOutput) -> None:
        """Adds the results of the next step."""
        for ticket, token_ids in later.token_ids.items():
            self.token_ids.setdefault(ticket, []).extend(token_ids)
        for ticket, logprobs in later.logprobs.items():
            self.logprobs.setdefault(ticket, []).extend(logprobs)
        self.completions |= later.completions


@dataclass(frozen=True, slots=True)
class Left:
    """A request has left the engine, and gets no more results. error: why it was refused, or None"""

    ticket: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A function has returned, or raised. number: of the question"""

    number: int
    result: object
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The last step has run: the engine was stopped, or an exception has ended it."""

    error: BaseException | None


Message = StepOutput | Left | Answer | Ended
# Takes what an engine tells its owner, in any thread. Raises OwnerGone.
Owner = Callable[[Message], None]


class OwnerGone(Exception):
    """The results have no owner: its event loop was closed, or its process has ended."""


class EngineThread:
    """Runs an engine's steps while there is work, and commands between them.

    A command is a method from submit() to stop(), and is given by tell(), in any thread.

    A DeviceFault ends the requests that the engine names. Any other exception of the engine ends the thread, and every
    request is given up. An owner that is gone does the same.
    """

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        # SimpleQueue.put may be called from a destructor, which garbage collection runs anywhere.
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._number_of: dict[int, int] = {}  # ticket -> the engine's number
        self._ticket_of: dict[int, int] = {}
        self._preparing: dict[int, tuple[Request, float]] = {}  # ticket -> request, and when it came
        self._num_pauses = 0
        self._is_stopping = False

    def start(self, owner: Owner) -> None:
        """Starts serving, in a thread of its own. Raises WrongState if another one serves the engine."""
        # Each of two threads would drop the tokens of the other's requests.
        if _serving.setdefault(id(self._engine), self) is not self:
            raise WrongState("another AsyncEngine serves this engine; use that one, or leave its `async with` first")
        # A daemon: a device that hangs does not delay the end of a process that has not stopped the thread.
        self._thread = threading.Thread(target=self.run, args=(owner,), name="rocm_attn engine", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits for the end of a thread that has sent Ended, which is near."""
        self._thread.join()

    @property
    def limits(self) -> RequestLimits:
        """The limits of the engine."""
        return self._engine.limits

    def tell(self, command: Callable[Concatenate[EngineThread, P], None], *arguments: P.args, **_: P.kwargs) -> None:
        """Gives a command, and does not wait for it."""
        if command is EngineThread.report:  # it does not wait for a step that hangs
            threading.Thread(target=command, args=(self, *arguments), daemon=True).start()
        else:
            self._commands.put(partial(command, self, *arguments))

    def run(self, owner: Owner) -> None:
        """Serves in the current thread, until stop() or until nothing more can be served."""
        self._owner = owner
        error: BaseException | None = None
        try:
            self._serve()
        except OwnerGone as gone:
            logging.getLogger(__name__).warning("%s before the engine was stopped", gone)
        except BaseException as ending:  # callers get to know it
            error = ending
        _tell_end(owner, error)
        if error is not None:  # after the owner, because memory for the log may be lacking
            logging.getLogger(__name__).error("the engine has ended", exc_info=error)
        try:
            for number in self._ticket_of:
                self._engine.cancel(number)
        except Exception as error:  # the exception that ended the engine may have broken its state
            logging.getLogger(__name__).error("requests could not be aborted: %s", error)
        finally:
            _serving.pop(id(self._engine), None)

    def submit(self, ticket: int, request: Request) -> None:
        """Queues a request of the owner."""
        try:
            if not self._engine.can_prepare(request):
                raise FitsLater(
                    f"{MOST_COMPILING} constraints are being compiled or wait for it, which is the limit; send "
                    "this one again later"
                )
        except RocmAttnError as error:
            self._owner(Left(ticket, error))
            return
        self._preparing[ticket] = request, time.monotonic()
        self._submit_prepared()

    def abort(self, ticket: int, reason: FinishReason = "abort") -> None:
        """Ends a request; its completion comes with a step's results. A request that has ended is left unchanged."""
        if ticket in self._preparing:
            request, _ = self._preparing.pop(ticket)
            completion = Completion(request.prompt_token_ids, (), "", reason)
            self._owner(StepOutput({ticket: []}, completions={ticket: completion}))
        number = self._number_of.get(ticket)
        if number is not None:
            self._engine.abort(number, reason)

    def forget(self, ticket: int) -> None:
        """Ends a request whose results are not wanted."""
        self._preparing.pop(ticket, None)
        number = self._number_of.get(ticket)
        if number is not None:
            self._drop(number)
            self._engine.cancel(number)
        self._owner(Left(ticket))

    def call(self, number: int, function: Callable[[], object]) -> None:
        """Calls a function while nothing runs on the device. number: of the question, which its Answer has"""
        self._engine.settle()
        self._answer(number, function)

    def probe_truth(self, number: int, seed: int) -> None:
        """Calls the engine's probe_truth()."""
        self.call(number, partial(self._engine.probe_truth, seed))

    def report(self, number: int) -> None:
        """Calls the engine's report(), in another thread and while steps run."""
        self._answer(number, self._engine.report)

    def pause(self, pauses: int) -> None:
        """Waits for the step that runs, and runs no further one; commands still run.

        pauses: 1, or -1 to take one back
        """
        self._num_pauses += pauses
        if self._num_pauses:
            self._engine.settle()

    def stop(self) -> None:
        """Gives up all requests and ends."""
        self._is_stopping = True

    def _serve(self) -> None:
        while not self._is_stopping:
            if self._num_pauses == 0 and self._engine.has_work:
                self._step()
            else:
                self._wait()
            while not self._is_stopping and not self._commands.empty():
                self._commands.get()()
            if self._preparing and not self._is_stopping:
                self._submit_prepared()

    def _wait(self) -> None:
        """Runs one command; now and then returns without one."""
        try:
            self._commands.get(timeout=_LOOK_AT_PREPARED_SECONDS if self._preparing else _LOOK_AT_OWNER_SECONDS)()
        except queue.Empty:
            self._owner(StepOutput())  # raises OwnerGone

    def _step(self) -> None:
        try:
            events = self._engine.step()
        except DeviceFault as fault:
            # The engine's next events name the requests that it failed.
            logging.getLogger(__name__).warning("a fault of the device: %s", fault)
            return
        output = self._output(events)
        if output.token_ids:
            self._owner(output)

    def _output(self, events: Sequence[Event]) -> StepOutput:
        """The results of a step. A failure may follow a request's last token."""
        output, ended = StepOutput(), dict[int, None]()
        token_ids, ticket_of = output.token_ids, self._ticket_of
        for event in events:
            ticket = ticket_of.get(event.request)
            if ticket is None:
                continue  # a request that another caller has submitted
            of_request = token_ids.get(ticket)
            if of_request is None:
                of_request = token_ids[ticket] = []
            if isinstance(event, TokenEvent):
                of_request.append(event.token_id)
                if event.logprobs is not None:
                    output.logprobs.setdefault(ticket, []).append(event.logprobs)
                if event.finish_reason is None:
                    continue
            ended[event.request] = None
        for number in ended:
            output.completions[ticket_of[number]] = self._engine.completion(number)
            self._drop(number)
        return output

    def _drop(self, number: int) -> None:
        ticket = self._ticket_of.pop(number, None)
        if ticket is not None:
            del self._number_of[ticket]

    def _submit_prepared(self) -> None:
        """Submits requests that are prepared: their tokens do not wait for the constraints of others."""
        for ticket, (request, came) in tuple(self._preparing.items()):
            try:
                if self._engine.is_prepared(request):
                    number = self._engine.submit(request)
                    self._number_of[ticket], self._ticket_of[number] = number, ticket
                elif time.monotonic() - came > MOST_PREPARING_SECONDS:
                    raise BadRequest(
                        f"the constraint was not compiled within {MOST_PREPARING_SECONDS:g} seconds; simplify it, "
                        "or send it again when there are fewer others"
                    )
                else:
                    continue
            except RocmAttnError as error:
                self._owner(Left(ticket, error))
            del self._preparing[ticket]

    def _answer(self, number: int, function: Callable[[], object]) -> None:
        try:
            result = function()
        except StopIteration as error:  # no future takes it
            raised = RuntimeError("the function raised StopIteration")
            raised.__cause__ = error
            self._owner(Answer(number, None, raised))
        except BaseException as error:  # the caller's own
            self._owner(Answer(number, None, error))
        else:
            self._owner(Answer(number, result))


def _tell_end(owner: Owner, error: BaseException | None) -> None:
    """Sends Ended, again and again while there is no memory for it: the owner waits for this message."""
    while True:
        try:
            owner(Ended(error))
        except OwnerGone:
            return
        except MemoryError:
            time.sleep(_TELL_AGAIN_SECONDS)
        else:
            return
