"""AsyncEngine: an asyncio front of an engine, which the tasks of an event loop share, such as a server's handlers.

The engine runs elsewhere, in a thread or a process of its own, so no step blocks the event loop. It returns token ids;
this side detokenises them, and ends a request at a stop text. engine_thread.py is the other side.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from rocm_attn.errors import BadRequest, FitsLater, RocmAttnError, WrongState
from rocm_attn.machine.settings import whole_number
from rocm_attn.step.metrics import Metrics
from rocm_attn.truth.verdict import TruthVerdict
from rocm_serve.engine_thread import Answer, EngineThread, Left, Message, Owner, OwnerGone, ServingEngine, StepOutput
from rocm_serve.limits import RequestLimits
from rocm_serve.report import Report
from rocm_serve.request import Completion, Request
from rocm_serve.request_stream import Inbox, RequestFailed, RequestStream

T = TypeVar("T")
P = ParamSpec("P")
C = TypeVar("C", bound="EngineClient")


class EngineEnded(RocmAttnError, RuntimeError):
    """The engine no longer serves: it was stopped, or an exception has ended it, which is then the __cause__."""


class TooManyRequests(FitsLater):
    """The engine has max_requests requests already. Submit again when one of them is done."""


class RunningEngine(Protocol):
    """An engine that runs elsewhere: what EngineThread and EngineProcess have in common."""

    @property
    def limits(self) -> RequestLimits: ...
    def start(self, owner: Owner) -> None: ...
    def tell(
        self, command: Callable[Concatenate[EngineThread, P], None], *arguments: P.args, **_: P.kwargs
    ) -> None: ...
    def join(self) -> None: ...


class EngineClient:
    """Serves requests of many asyncio tasks by an engine in a thread (AsyncEngine) or in a process (EngineProcess).

    engine, max_requests: see AsyncEngine
    """

    def __init__(self, engine: RunningEngine, *, max_requests: int = 1024) -> None:
        max_requests = whole_number("max_requests", max_requests, least=1)
        self._engine = engine
        self._max_requests = max_requests
        self._books = _Books(engine)
        self._numbers = count()
        self._is_draining = False

    async def __aenter__(self: C) -> C:
        self._books.open()
        try:
            self._engine.start(self._books.post)
        except BaseException:
            self._books = _Books(self._engine)  # it was not started, and the engine may serve another client
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.drain()
        finally:
            await self.stop()

    def stream(self, request: Request) -> RequestStream:
        """Queues a request, and returns the stream of its output. The request is queued when this returns."""
        (stream,) = self.streams((request,))
        return stream

    def streams(self, requests: Sequence[Request]) -> list[RequestStream]:
        """Like stream(), for several requests: all are queued when this returns, none if it raises."""
        self.check()
        requests = list(requests)  # an iterator would be at its end after the checks
        for request in requests:
            self._engine.limits.check(request)
        if self._is_draining:
            raise EngineEnded("the engine accepts no more requests: drain() was called")
        if len(self._books.inboxes) + len(requests) > self._max_requests:
            self._books.num_refusals += len(requests)
            requested = "this one" if len(requests) == 1 else f"these {len(requests)}"
            raise TooManyRequests(
                f"{len(self._books.inboxes)} requests run or wait, and max_requests allows {self._max_requests}; "
                f"send {requested} again when some of them are done"
            )
        return [self._begin(request) for request in requests]

    def _begin(self, request: Request) -> RequestStream:
        tokenizer = self._engine.limits.tokenizer if request.detokenise else None
        number, inbox = next(self._numbers), Inbox(request, tokenizer)
        self._engine.tell(EngineThread.submit, number, replace(request, stop=(), detokenise=False))
        self._books.add(number, inbox)  # last, because tell() may refuse it; results come in this event loop, later
        return RequestStream(number, inbox, lambda number: self._engine.tell(EngineThread.forget, number))

    async def complete(self, request: Request) -> Completion:
        """Serves a request to its end. Also raises RequestFailed. If the task is cancelled, the request is aborted."""
        async with self.stream(request) as stream:
            return await stream.completion()

    def check(self) -> None:
        """Raises EngineEnded if the engine does not serve, and WrongState outside its event loop."""
        self._books.check()

    @property
    def num_requests(self) -> int:
        """Number of requests that run or wait."""
        return len(self._books.inboxes)

    async def ended(self) -> None:
        """Waits until the engine no longer serves; check() then raises the reason."""
        self._books.require_start()
        await self._books.has_ended.wait()

    async def report(self) -> Report:
        """Like Engine.report, read while steps run: the report may hold only some counts of the last step."""
        report: Report = await self._answer(EngineThread.report)
        return report

    async def truth(self, seed: int) -> TruthVerdict:
        """Like Engine.probe_truth, between two steps. Raises EngineEnded."""
        self.check()
        verdict: TruthVerdict = await self._answer(EngineThread.probe_truth, seed)
        return verdict

    async def metrics(self) -> Metrics:
        """The metrics of report(), and the number of requests that were refused."""
        return (await self.report()).metrics.snapshot(refusals=self._books.num_refusals)

    async def drain(self) -> None:
        """Refuses new requests from now on, and waits until the accepted ones are done."""
        self._books.require_start()
        self._is_draining = True
        await self._books.is_empty.wait()

    async def stop(self) -> None:
        """Aborts all requests, whose readers get EngineEnded, and waits until the engine's thread has ended.

        The thread ends after the running step, even if the task is cancelled meanwhile.
        """
        self._books.require_start()
        self._books.close("it was stopped")
        self._engine.tell(EngineThread.stop)
        await self._books.has_ended.wait()
        self._engine.join()

    async def _answer(
        self, command: Callable[Concatenate[EngineThread, int, P], None], *arguments: P.args, **named: P.kwargs
    ) -> Any:
        """Gives a command whose first argument is the number of a question, and waits for the Answer."""
        self._books.require_start()
        if self._books.has_ended.is_set():
            self._books.check()
        number = next(self._numbers)
        answer = self._books.questions[number] = asyncio.get_running_loop().create_future()
        self._engine.tell(command, number, *arguments, **named)
        try:
            return await answer
        finally:
            self._books.questions.pop(number, None)


class AsyncEngine(EngineClient):
    """Serves requests of many asyncio tasks by one engine, in a thread of its own.

        async with AsyncEngine(engine) as front:
            async for piece in front.stream(request):
                print(piece.text, end="")

    Leaving the `async with` waits for all accepted requests. If an exception or a cancellation leaves it, they are
    aborted. In both cases the thread has ended afterwards. Until then, do not use the engine directly; use
    between_steps().

    engine:       an Engine, or an object with its methods
    max_requests: most requests that run or wait at a time, at least 1; more are refused

    Use it only in the event loop in which it was started. Methods that take a request raise BadRequest if the engine
    can never serve it, TooManyRequests, and EngineEnded. Other requests are not affected.

    Raises BadSetting; entering it WrongState, if another one serves the engine.
    """

    def __init__(self, engine: ServingEngine, *, max_requests: int = 1024) -> None:
        self._thread, self._of_thread = EngineThread(engine), engine
        super().__init__(self._thread, max_requests=max_requests)

    async def report(self) -> Report:
        """Like EngineClient.report, also after the engine has ended."""
        return await asyncio.to_thread(self._of_thread.report)

    async def abort(self, number: int) -> None:
        """Ends a request with the finish reason "abort". Its pages have been freed when this returns.

        number: RequestStream.number; nothing happens if that request has ended
        Raises BadRequest for no whole number, and EngineEnded.
        """
        self.check()
        self._thread.tell(EngineThread.abort, whole_number("number", number, BadRequest))
        await self.between_steps(_nothing)

    async def between_steps(self, function: Callable[[], T]) -> T:
        """Calls a function in the engine's thread while no step runs; returns its result, or raises its exception.

        The function must not step the engine, as generate() does: the tokens of other requests would be lost. Raises
        EngineEnded. If the task is cancelled, the function may run nevertheless.
        """
        self.check()
        result: T = await self._answer(EngineThread.call, function)
        return result

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Returns a context in which no step runs, so that weights can be changed in place.

        Requests are accepted, but wait for its end. So does the last output of a request that is aborted.
        """
        self.check()
        self._thread.tell(EngineThread.pause, 1)
        try:
            await self.between_steps(_nothing)
            yield
        finally:
            self._thread.tell(EngineThread.pause, -1)


class _Books:
    """The tasks that wait, and what they wait for: the owner of a running engine.

    inboxes:   number of a request that is in the engine -> where its pieces go
    questions: number of what the engine was asked -> the future of its answer
    num_refusals: requests that were not taken because there were too many
    is_empty:  set if no request is in the engine
    has_ended: set if the engine runs no more step
    """

    def __init__(self, engine: RunningEngine) -> None:
        self._engine = engine
        self.inboxes: dict[int, Inbox] = {}
        self.questions: dict[int, asyncio.Future[Any]] = {}
        self.num_refusals = 0
        self.is_empty, self.has_ended = asyncio.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._why_closed = "it was not started; use `async with`"
        self._cause: BaseException | None = None

    def open(self) -> None:
        if self._loop is not None:
            raise WrongState("an AsyncEngine can be started only once; build another one over the engine")
        self._loop = asyncio.get_running_loop()
        self._why_closed = ""
        self.is_empty.set()

    def require_start(self) -> None:
        """Raises EngineEnded if the engine was never started."""
        if self._loop is None:
            raise self._ending()

    def close(self, why: str) -> None:
        """Refuses all further requests. The first reason is kept."""
        self._why_closed = self._why_closed or why

    def check(self) -> None:
        """Raises EngineEnded, or WrongState outside the event loop."""
        if self._why_closed:
            raise self._ending()
        if asyncio.get_running_loop() is not self._loop:
            raise WrongState("an AsyncEngine must be used in the event loop that started it; this is another one")

    def add(self, number: int, inbox: Inbox) -> None:
        self.inboxes[number] = inbox
        self.is_empty.clear()

    def post(self, message: Message) -> None:
        """Takes a message in the event loop. Called in any thread. Raises OwnerGone."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._take, message)
        except RuntimeError as error:
            if self._loop.is_closed():
                raise OwnerGone("the event loop was closed") from error
            raise

    def _take(self, message: Message) -> None:
        """Takes in a message. An error here ends the engine, because requests would wait for lost results for ever."""
        try:
            self._take_in(message)
        except Exception as error:
            logging.getLogger(__name__).error("a message of the engine could not be taken in", exc_info=error)
            self._engine.tell(EngineThread.stop)
            self._end(error)

    def _take_in(self, message: Message) -> None:
        if isinstance(message, StepOutput):
            self._take_output(message)
        elif isinstance(message, Left):
            self.num_refusals += isinstance(message.error, FitsLater)
            if message.error is not None and message.ticket in self.inboxes:
                self.inboxes[message.ticket].fail(message.error)
            self._forget(message.ticket)
        elif isinstance(message, Answer):
            self._take_answer(message)
        else:
            self._end(message.error)

    def _take_output(self, output: StepOutput) -> None:
        logprobs, completions = output.logprobs, output.completions
        for ticket, token_ids in output.token_ids.items():
            inbox = self.inboxes.get(ticket)
            if inbox is None:
                continue
            had_stopped = inbox.has_stopped
            try:
                inbox.add(token_ids, logprobs.get(ticket, ()), completions.get(ticket))
            except (Exception, asyncio.CancelledError) as error:  # other requests have results in this message too
                inbox.fail(_lost(inbox.request, error))
                self._engine.tell(EngineThread.forget, ticket)
            if inbox.has_ended:
                self._forget(ticket)
            elif inbox.has_stopped and not had_stopped:
                self._engine.tell(EngineThread.abort, ticket, "stop")

    def _forget(self, ticket: int) -> None:
        self.inboxes.pop(ticket, None)
        if not self.inboxes:
            self.is_empty.set()

    def _take_answer(self, answer: Answer) -> None:
        waiting = self.questions.get(answer.number)
        if waiting is None or waiting.done():
            return  # its task was cancelled
        if answer.error is not None:
            waiting.set_exception(answer.error)
        else:
            waiting.set_result(answer.result)

    def _end(self, error: BaseException | None) -> None:
        """Each task that waits gets EngineEnded."""
        if self.has_ended.is_set():  # a message could not be taken in before
            return
        self._cause = error
        self._why_closed = "it was stopped" if error is None else f"{type(error).__name__}: {error}"
        for inbox in self.inboxes.values():
            inbox.fail(self._ending())
        for waiting in self.questions.values():
            if not waiting.done():
                waiting.set_exception(self._ending())
        self.inboxes.clear()
        self.is_empty.set()
        self.has_ended.set()

    def _ending(self) -> EngineEnded:
        """A new exception for each reader: each adds its own traceback."""
        ending = EngineEnded(f"the engine accepts no more requests: {self._why_closed}")
        ending.__cause__ = self._cause
        return ending


def _lost(request: Request, error: BaseException) -> RequestFailed:
    """The error of a request whose output could not be taken in."""
    why = f"its output could not be taken in: {type(error).__name__}: {error}"
    return RequestFailed(Completion(request.prompt_token_ids, (), "", "error", error=why))


def _nothing() -> None:
    pass
