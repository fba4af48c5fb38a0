"""EngineThread: one thread that runs an engine's steps, and takes commands of other threads.

Commands reach the thread through a queue, in the order in which they were given, and run between two steps. The thread
hands its results to the event loop of its owner. While there is no work it waits for a command.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from rocm_attn.errors import BadRequest, DeviceFault, FitsLater, RocmAttnError
from rocm_attn.truth.live import TruthVerdict
from rocm_serve.events import Events, NewTokens
from rocm_serve.report import Report
from rocm_serve.request import Completion, Event, Request, TokenEvent
from rocm_serve.sampling.logprobs import TokenLogprobs
from rocm_serve.text.matching import MOST_COMPILING

# Interval at which an idle thread checks whether its event loop was closed without stopping it.
_LOOK_AT_LOOP_SECONDS = 1.0
# Interval at which an idle thread checks whether a request is prepared.
_LOOK_AT_PREPARED_SECONDS = 0.005
# Most seconds for preparing a request, which is compiling its constraint.
MOST_PREPARING_SECONDS = 20.0

Command = Callable[[], None]


class ServingEngine(Protocol):
    """The methods of an engine that an EngineThread calls; see Engine and RankedEngine.

    One thread calls them, except check() and report(), which are also called while that thread is in step().
    """

    @property
    def has_work(self) -> bool: ...
    def check(self, request: Request) -> None: ...
    def can_prepare(self, request: Request) -> bool: ...
    def is_prepared(self, request: Request) -> bool: ...
    def submit(self, request: Request) -> int: ...
    def step(self) -> Sequence[Event]: ...
    def abort(self, number: int) -> None: ...
    def cancel(self, number: int) -> None: ...
    def settle(self) -> None: ...
    def probe_truth(self, seed: int) -> TruthVerdict: ...
    def completion(self, number: int) -> Completion: ...
    def report(self) -> Report: ...


@dataclass(frozen=True, slots=True)
class Update:
    """The result of a step for one request.

    ticket:     the owner's number of the request
    completion: of a request that has ended, or None
    logprobs:   of the tokens, if the request asks for them
    """

    ticket: int
    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None
    logprobs: tuple[TokenLogprobs, ...] = ()


class Owner(Protocol):
    """The calls that an EngineThread makes to its owner. All of them run in the owner's event loop."""

    def take(self, updates: Sequence[Update]) -> None:
        """Receives the updates of requests."""

    def refuse(self, ticket: int, error: Exception) -> None:
        """The engine refused a request."""

    def forget(self, ticket: int) -> None:
        """A request is not in the engine any more, and gets no more updates."""

    def answer(self, waiting: asyncio.Future[Any], result: object, error: Exception | None) -> None:
        """A call between two steps has returned, or raised."""

    def end(self, error: BaseException | None) -> None:
        """The thread has run its last step: it was stopped, or an exception has ended it."""


class _LoopClosed(Exception):
    """The owner's event loop was closed."""


class EngineThread:
    """Runs an engine's steps while there is work. Its methods may be called from any thread, and never wait.

    A DeviceFault ends the requests that the engine names. Any other exception of the engine ends the thread, and every
    request is given up. A closed event loop does the same.
    """

    def __init__(self, engine: ServingEngine, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._owner, self._loop = engine, owner, loop
        # SimpleQueue.put may be called from a destructor, which garbage collection runs anywhere.
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._number_of: dict[int, int] = {}  # ticket -> the engine's number
        self._ticket_of: dict[int, int] = {}
        self._preparing: dict[int, tuple[Request, float]] = {}  # ticket -> request, and when it came
        self._num_pauses = 0
        self._is_stopping = False
        # A daemon: a device that hangs does not delay the end of a process that has not stopped the thread.
        self._thread = threading.Thread(target=self._run, name="rocm_attn engine", daemon=True)

    def start(self) -> None:
        """Starts serving."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True if it was started and has not ended."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Waits for the end of a thread that has called Owner.end, which is near."""
        self._thread.join()

    def submit(self, ticket: int, request: Request) -> None:
        """Queues a request of the owner."""
        self._commands.put(partial(self._submit, ticket, request))

    def abort(self, ticket: int) -> None:
        """Ends a request; its completion comes as an update. A request that has ended is left unchanged."""
        self._commands.put(partial(self._abort, ticket))

    def forget(self, ticket: int) -> None:
        """Ends a request whose results are not wanted any more."""
        self._commands.put(partial(self._forget, ticket))

    def call(self, function: Callable[[], object], waiting: asyncio.Future[Any]) -> None:
        """Calls a function between two steps, while none runs on the device. waiting: gets the answer"""
        self._commands.put(partial(self._call, function, waiting))

    def pause(self) -> None:
        """Runs no further step, and waits for the one that runs; commands still run. Pauses are counted."""
        self._commands.put(partial(self._add_pauses, 1))

    def resume(self) -> None:
        """Takes one pause() back."""
        self._commands.put(partial(self._add_pauses, -1))

    def stop(self) -> None:
        """Gives up all requests and ends, after the step that runs."""
        self._commands.put(self._stop)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._serve()
        except _LoopClosed:
            logging.getLogger(__name__).warning("the event loop was closed before the engine was stopped")
        except BaseException as ending:  # callers get to know it
            error = ending
            logging.getLogger(__name__).error("the engine has ended", exc_info=ending)
        with suppress(_LoopClosed):
            self._post(self._owner.end, error)
        try:
            for number in self._ticket_of:
                self._engine.cancel(number)
        except Exception as error:  # the exception that ended the engine may have broken its state
            logging.getLogger(__name__).error("requests could not be aborted: %s", error)

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
            self._commands.get(timeout=_LOOK_AT_PREPARED_SECONDS if self._preparing else _LOOK_AT_LOOP_SECONDS)()
        except queue.Empty:
            if self._loop.is_closed():
                raise _LoopClosed from None

    def _step(self) -> None:
        try:
            events = self._engine.step()
        except DeviceFault as fault:
            # The engine's next events name the requests that it failed.
            logging.getLogger(__name__).warning("a fault of the device: %s", fault)
            return
        updates = self._updates(events)
        if updates:
            self._post(self._owner.take, updates)

    def _updates(self, events: Sequence[Event]) -> list[Update]:
        """One update per request. A failure may follow a request's last token."""
        tokens: dict[int, list[int]] = {}
        logprobs: dict[int, list[TokenLogprobs]] = {}
        texts: dict[int, str] = {}
        ended = dict[int, None]()
        for event in events.parts if isinstance(events, Events) else events:
            if isinstance(event, NewTokens):
                for number, token_ids in zip(event.requests, event.token_ids, strict=True):
                    if number in self._ticket_of:
                        tokens.setdefault(number, []).extend(token_ids)
                        texts.setdefault(number, "")
                continue
            number = event.request
            if number not in self._ticket_of:
                continue  # a request that another caller has submitted
            of_request = tokens.setdefault(number, [])
            texts[number] = texts.get(number, "") + event.text
            if isinstance(event, TokenEvent):
                of_request.append(event.token_id)
                if event.logprobs is not None:
                    logprobs.setdefault(number, []).append(event.logprobs)
            if not isinstance(event, TokenEvent) or event.finish_reason is not None:
                ended[number] = None
        completions = {number: self._engine.completion(number) for number in ended}
        updates = [
            Update(
                self._ticket_of[number],
                tuple(new),
                texts[number],
                completions.get(number),
                tuple(logprobs.get(number, ())),
            )
            for number, new in tokens.items()
        ]
        for number in ended:
            self._drop(number)
        return updates

    def _drop(self, number: int) -> None:
        ticket = self._ticket_of.pop(number, None)
        if ticket is not None:
            del self._number_of[ticket]

    def _submit(self, ticket: int, request: Request) -> None:
        try:
            if not self._engine.can_prepare(request):
                raise FitsLater(
                    f"{MOST_COMPILING} constraints are being compiled or wait for it, which is the limit; send "
                    "this one again later"
                )
        except RocmAttnError as error:
            self._post(self._owner.refuse, ticket, error)
            return
        self._preparing[ticket] = request, time.monotonic()
        self._submit_prepared()

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
                self._post(self._owner.refuse, ticket, error)
            del self._preparing[ticket]

    def _abort(self, ticket: int) -> None:
        if ticket in self._preparing:
            request, _ = self._preparing.pop(ticket)
            completion = Completion(request.prompt_token_ids, (), "", "abort")
            self._post(self._owner.take, [Update(ticket, (), "", completion)])
        number = self._number_of.get(ticket)
        if number is not None:
            self._engine.abort(number)

    def _forget(self, ticket: int) -> None:
        if ticket in self._preparing:
            del self._preparing[ticket]
        number = self._number_of.get(ticket)
        if number is not None:
            self._drop(number)
            self._engine.cancel(number)
        self._post(self._owner.forget, ticket)

    def _call(self, function: Callable[[], object], waiting: asyncio.Future[Any]) -> None:
        result: object = None
        error: Exception | None = None
        self._engine.settle()
        try:
            result = function()
        except Exception as raised:  # the caller's own
            error = raised
        self._post(self._owner.answer, waiting, result, error)

    def _add_pauses(self, pauses: int) -> None:
        self._num_pauses += pauses
        if self._num_pauses:
            self._engine.settle()

    def _stop(self) -> None:
        self._is_stopping = True

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        """Schedules a call in the event loop. Raises _LoopClosed."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError as error:
            if self._loop.is_closed():
                raise _LoopClosed from error
            raise
