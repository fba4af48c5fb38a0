"""EngineProcess: an engine in a process of its own, which shares neither cores nor Python's lock with its clients.

One pipe joins the two processes: the methods of an EngineThread go there as commands, its messages come back. A step's
results are one message. Each process ends, or learns that the other has ended, whatever ends the other.
"""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from rocm_attn.errors import RocmAttnError
from rocm_serve.engine_thread import (
    Answer,
    Ended,
    EngineThread,
    Message,
    Owner,
    OwnerGone,
    Refused,
    ServingEngine,
    StepOutput,
)
from rocm_serve.limits import RequestLimits
from rocm_serve.parallel.messages import sendable
from rocm_serve.parallel.rank_process import end_with_parent
from rocm_serve.request import FinishReason, Request

# Seconds for the process to end when it is stopped, and to be gone when its pipe has ended.
_END_SECONDS, _GONE_SECONDS = 20.0, 5.0
# Messages that are taken in a row, before the event loop does something else.
_MOST_AT_ONCE = 32

EngineMaker = Callable[[], AbstractContextManager[ServingEngine]]


class EngineDied(RocmAttnError, RuntimeError):
    """The engine's process has ended, and has not said why."""


class EngineProcess:
    """A running engine for an EngineClient. Use it as a context: its process has ended afterwards.

    make:   makes the engine, in its process: a function of a module, or a partial of one. Processes are spawned, so a
            script keeps its own work under `if __name__ == "__main__":`
    limits: of the engine

    Raises what make() raises, and EngineDied.
    """

    def __init__(self, make: EngineMaker) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(make, theirs), name="rocm_attn engine")
        self._process.start()
        theirs.close()  # so that the pipe ends when the process does
        # SimpleQueue.put may be called from a destructor, which garbage collection runs anywhere.
        self._commands: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._asked: dict[int, Any] = {}
        self._numbers = count()
        self._has_ended = False
        with ExitStack() as unless_made:
            unless_made.callback(self.close)
            made = self._hear()
            if isinstance(made, Ended):
                assert made.error is not None
                raise made.error
            self.limits: RequestLimits = made
            unless_made.pop_all()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def close(self) -> None:
        """Ends the process at once, unless it has ended."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def start(self, owner: Owner) -> None:
        """Starts serving. Messages are read in the current event loop."""
        self._owner, self._loop = owner, asyncio.get_running_loop()
        self._loop.add_reader(self._pipe.fileno(), self._take_all)
        # A thread: a long prompt, or a process that hangs, would hold up the event loop.
        threading.Thread(target=self._write, name="commands", daemon=True).start()

    def check(self, request: Request) -> None:
        """Like EngineThread.check."""
        self.limits.check(request)

    def submit(self, ticket: int, request: Request) -> None:
        """Like EngineThread.submit."""
        self._commands.put(("submit", (ticket, request)))

    def abort(self, ticket: int, reason: FinishReason = "abort") -> None:
        """Like EngineThread.abort."""
        self._commands.put(("abort", (ticket, reason)))

    def forget(self, ticket: int) -> None:
        """Like EngineThread.forget."""
        self._commands.put(("forget", (ticket,)))

    def ask(self, method: str, arguments: tuple[Any, ...], asked: Any) -> None:
        """Like EngineThread.ask."""
        self._commands.put(("ask", (method, arguments, self._number_of(asked))))

    def report(self, asked: Any) -> None:
        """Like EngineThread.report."""
        self._commands.put(("report", (self._number_of(asked),)))

    def stop(self) -> None:
        """Like EngineThread.stop. A process that does not end is killed after a while."""
        self._commands.put(("stop", ()))
        self._loop.call_later(_END_SECONDS, self._process.kill)

    def join(self) -> None:
        """Waits for the end of a process that has sent Ended, which is near."""
        self._process.join(_END_SECONDS)
        self.close()

    def _number_of(self, asked: Any) -> int:
        if self._has_ended:
            self._owner(Answer(asked, None, EngineDied("the engine's process has ended")))
        number = next(self._numbers)
        self._asked[number] = asked
        return number

    def _take_all(self) -> None:
        """Passes on the messages that have come: several steps' if the event loop is late, which holds up no step."""
        self._take()
        for _ in range(_MOST_AT_ONCE):
            if self._has_ended or not self._pipe.poll():
                break
            self._take()

    def _take(self) -> None:
        message = self._hear()
        if isinstance(message, Answer):
            message = replace(message, asked=self._asked.pop(message.asked))
        elif isinstance(message, Ended):
            self._has_ended = True
            self._loop.remove_reader(self._pipe.fileno())
            for asked in self._asked.values():
                self._owner(Answer(asked, None, EngineDied("the engine's process has ended")))
        self._owner(message)

    def _hear(self) -> Any:
        """Returns the next message of the process, which is its limits when it is made."""
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_GONE_SECONDS)
            code = self._process.exitcode
            how = "has closed its pipe" if code is None else f"ended with exit code {code}"
            if code is not None and code < 0:
                how = f"was killed by {signal.Signals(-code).name}"
            return Ended(EngineDied(f"the engine's process {how}"))

    def _write(self) -> None:
        while True:
            command = self._commands.get()
            try:
                self._pipe.send(command)
            except (OSError, ValueError):  # the process has ended, or close() was called
                return
            if command[0] == "stop":
                return


def _run(make: EngineMaker, pipe: Connection) -> None:
    """Makes the engine and serves commands until stop; does not return."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):  # they may go to all processes; the other one drains and stops us
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    _serve(make, pipe)
    sys.stderr.flush()
    os._exit(0)  # see run_rank


def _serve(make: EngineMaker, pipe: Connection) -> None:
    lock = threading.Lock()  # reports are answered in threads of their own

    def tell(message: Message | RequestLimits) -> None:
        try:
            with lock:
                pipe.send(message)
        except OSError as error:
            raise OwnerGone("the server's process ended") from error

    with ExitStack() as until_served:
        try:
            engine = until_served.enter_context(make())
        except BaseException as error:  # the other process decides what it means
            if not isinstance(error, RocmAttnError):
                traceback.print_exc()
            tell(Ended(sendable(error)))
            return
        tell(engine.limits)
        thread = EngineThread(engine)
        threading.Thread(target=_read, args=(pipe, thread), name="commands", daemon=True).start()
        thread.run(lambda message: tell(_sendable(message)))


def _read(pipe: Connection, thread: EngineThread) -> None:
    """Gives the engine's thread its commands; they are methods of EngineThread."""
    while True:
        try:
            method, arguments = pipe.recv()
        except (EOFError, OSError):
            thread.stop()
            return
        getattr(thread, method)(*arguments)


def _sendable(message: Message) -> Message:
    """Returns a message without prompts, which the other process has, and with errors that survive pickling."""
    if isinstance(message, StepOutput) and message.completions:
        done = {ticket: replace(each, prompt_token_ids=()) for ticket, each in message.completions.items()}
        return replace(message, completions=done)
    if isinstance(message, Ended) and message.error is not None:
        return Ended(sendable(message.error))
    if isinstance(message, Refused | Answer) and message.error is not None:
        return replace(message, error=sendable(message.error))
    return message
