"""EngineProcess: an engine in a process of its own, so that it does not share the GIL with its clients.

A pipe connects the two processes: calls of an EngineThread's methods go there as commands, and its messages come back.
A step's results are one message. If one process ends, for any reason, the other notices, and ends or raises.
"""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import pickle
import queue
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import cached_property
from io import BytesIO
from multiprocessing.connection import Connection
from typing import Any, Concatenate, ParamSpec

from rocm_attn.errors import RocmAttnError, WrongState
from rocm_serve.engine_thread import (
    Answer,
    Ended,
    EngineThread,
    Left,
    Message,
    Owner,
    OwnerGone,
    ServingEngine,
    StepOutput,
)
from rocm_serve.limits import RequestLimits
from rocm_serve.parallel.child_process import end_with_parent, ready_to_serve
from rocm_serve.parallel.messages import how_it_ended, pickled, require_sendable, sendable, unsendable

# Seconds for the process to end when it is stopped, and to be gone when its pipe has ended.
_END_SECONDS, _GONE_SECONDS = 20.0, 5.0
# Bytes of messages that are taken in a row, before the event loop does something else.
_MOST_AT_ONCE = 2**16
# The length before each message, as multiprocessing's connections send it: that of a long one follows a -1.
_LENGTH, _LONG_LENGTH, _IS_LONG = struct.Struct("!i"), struct.Struct("!iQ"), -1
_MOST_OF_LENGTH = (1 << 31) - 1

P = ParamSpec("P")
EngineMaker = Callable[[], AbstractContextManager[ServingEngine]]


class EngineDied(RocmAttnError, RuntimeError):
    """The engine's process has ended without a reason, for instance because it was killed."""


class EngineProcess:
    """An engine in a process of its own, for an EngineClient. Use it as a context manager: leaving it ends the process.

    make: builds the engine in its process, which starts at once: a module-level function that returns a context manager
          of the engine, or a partial of one. Processes are spawned, so a script must keep its own work under
          `if __name__ == "__main__":`

    Raises BadSetting for a make that the process cannot be given.
    """

    def __init__(self, make: EngineMaker) -> None:
        require_sendable("make", make)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(make, theirs), name="rocm_attn engine")
        self._process.start()
        theirs.close()  # so that the pipe ends when the process does
        # SimpleQueue.put may be called from a destructor, which garbage collection runs anywhere.
        self._commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._is_writing = self._is_read = False
        self._unread, self._unsent = bytearray(), bytearray()

    @property
    def limits(self) -> RequestLimits:
        """The limits of the engine. Waits until it is built. Raises what make() raises, and EngineDied."""
        made = self._made
        if isinstance(made, Ended):
            assert made.error is not None
            raise made.error
        return made

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
        """Ends the process at once, unless it has ended. A client that it still serves gets EngineDied."""
        self._process.kill()
        self._process.join()
        if not self._is_read:  # else the event loop reads its end first
            self._pipe.close()

    def start(self, owner: Owner) -> None:
        """Starts serving once the engine is built. Messages are read in the current event loop.

        Raises like limits, and WrongState for a second client, or after close().
        """
        _ = self.limits  # the first message
        if self._is_read or self._pipe.closed:
            raise WrongState("this engine's process serves a client already, or was closed; make another one")
        self._owner, self._loop = owner, asyncio.get_running_loop()
        os.set_blocking(self._pipe.fileno(), False)  # a process that hangs would hold up the event loop
        self._loop.add_reader(self._pipe.fileno(), self._take)
        self._is_read = True

    def tell(self, command: Callable[Concatenate[EngineThread, P], None], *arguments: P.args, **_: P.kwargs) -> None:
        """Like EngineThread.tell(). A process that does not end after stop() is killed after a while.

        Raises BadRequest for arguments that cannot be sent.
        """
        message = pickled((command, arguments[:1])) + pickled(arguments[1:])
        length = len(message)
        is_long = length > _MOST_OF_LENGTH
        self._commands.put((_LONG_LENGTH.pack(_IS_LONG, length) if is_long else _LENGTH.pack(length)) + message)
        if not self._is_writing:
            self._is_writing = True
            with suppress(RuntimeError):  # the event loop was closed
                self._loop.call_soon_threadsafe(self._write)
        if command is EngineThread.stop:
            self._loop.call_later(_END_SECONDS, self._process.kill)

    def join(self) -> None:
        """Waits until the process has ended, which is soon after it has sent Ended."""
        self._process.join(_END_SECONDS)
        self.close()

    def _take(self) -> None:
        """Passes on the messages that have come: several steps' if the event loop is late, which holds up no step.

        Results of steps in a row are passed on together: a text's tokens then cost its reader one call, and one write.
        """
        try:
            data = os.read(self._pipe.fileno(), _MOST_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._unread += data
        try:
            messages = self._messages() if data else [self._death()]
        except Exception as error:  # else requests would wait for ever for what was not read
            self._process.kill()
            messages = [Ended(error)]
        for message in messages:
            self._owner(message)
            if isinstance(message, Ended):
                self._loop.remove_reader(self._pipe.fileno())
                self._loop.remove_writer(self._pipe.fileno())
                self._is_read = False

    def _messages(self) -> list[Any]:
        """The messages that have come whole."""
        messages: list[Any] = []
        begin, have = 0, len(self._unread)
        while have >= begin + _LENGTH.size:
            first, length = begin + _LENGTH.size, _LENGTH.unpack_from(self._unread, begin)[0]
            if length == _IS_LONG:
                first = begin + _LONG_LENGTH.size
                if have < first:
                    break
                length = _LONG_LENGTH.unpack_from(self._unread, begin)[1]
            end = first + length
            if have < end:
                break
            message = pickle.loads(self._unread[first:end])
            if messages and isinstance(message, StepOutput) and isinstance(messages[-1], StepOutput):
                messages[-1].add(message)
            else:
                messages.append(message)
            begin = end
        del self._unread[:begin]
        return messages

    @cached_property
    def _made(self) -> RequestLimits | Ended:
        """The first message of the process: the limits of its engine, or why there is none."""
        try:
            made: RequestLimits | Ended = self._pipe.recv()
        except (EOFError, OSError):
            return self._death()
        return made

    def _death(self) -> Ended:
        self._process.join(_GONE_SECONDS)
        return Ended(EngineDied(f"the engine's process {how_it_ended(self._process.exitcode)}"))

    def _write(self) -> None:
        """Sends the commands that were given, together."""
        self._is_writing = False
        for _ in range(self._commands.qsize()):
            self._unsent += self._commands.get()
        self._send()

    def _send(self) -> None:
        """Sends what the pipe takes, and the rest when it takes more."""
        try:
            fileno = self._pipe.fileno()
            with suppress(BlockingIOError):
                del self._unsent[: os.write(fileno, self._unsent)]
        except OSError:  # the process has ended, or close() was called
            self._unsent.clear()
        else:
            if self._unsent:
                self._loop.add_writer(fileno, self._send)
            else:
                self._loop.remove_writer(fileno)


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
        ready_to_serve()
        tell(engine.limits)
        thread = EngineThread(engine)
        threading.Thread(target=_read, args=(pipe, thread, tell), name="commands", daemon=True).start()
        thread.run(lambda message: tell(_sendable(message)))


def _read(pipe: Connection, thread: EngineThread, tell: Owner) -> None:
    """Passes on the commands, until the other process ends and this one with it."""
    with suppress(EOFError, OSError, OwnerGone):
        while True:
            message = BytesIO(pipe.recv_bytes())
            command, first = pickle.load(message)
            try:
                arguments = pickle.load(message)
            except Exception as error:  # this process may lack a class of the other one's
                assert command is EngineThread.submit, "the arguments of the others are numbers"
                tell(Left(first[0], unsendable(error)))
            else:
                thread.tell(command, *first, *arguments)


def _sendable(message: Message) -> Message:
    """Returns a message without prompts, which the other process has, and with errors that survive pickling."""
    if isinstance(message, StepOutput) and message.completions:
        done = {ticket: replace(each, prompt_token_ids=()) for ticket, each in message.completions.items()}
        return replace(message, completions=done)
    if isinstance(message, Ended | Answer) and message.error is not None:
        return replace(message, error=sendable(message.error))
    if isinstance(message, Left) and message.error is not None:
        return replace(message, error=sendable(message.error))
    return message
