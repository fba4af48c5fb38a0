"""RankProcesses: starts the processes of tensor-parallel ranks, calls their engines, and watches them.

A rank that dies, or raises an error that the others do not, leaves the others in a collective that never ends. The
front process takes part in no collective, so it can watch all ranks: then it ends every rank and raises RankFailed.
"""

from __future__ import annotations

import atexit
import math
import multiprocessing
import selectors
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from rocm_attn.errors import BadRequest, RocmAttnError
from rocm_serve.limits import RequestLimits
from rocm_serve.parallel.messages import (
    Command,
    Done,
    OnProgress,
    Progressed,
    Raised,
    RankSetup,
    RankWaits,
    how_it_ended,
    in_words,
    pickled,
)
from rocm_serve.parallel.rank_process import CLOSE, run_rank

# Seconds until a rank that has not raised another rank's error counts as stuck.
GRACE_SECONDS = 5.0
# Likewise until they agree with a rank that could not make a graph. They may have kernels to compile before.
AGREE_SECONDS = 20.0
# Seconds for ranks to end after CLOSE or when they are killed, and for the last output of a dead rank to arrive.
_END_SECONDS = 10.0
_WORDS_SECONDS = 1.0
_KEPT_LINES = 20


class RankFailed(RocmAttnError, RuntimeError):
    """A rank of a model has died, or has raised an error that the others have not. All ranks were ended.

    rank: number of that rank
    """

    def __init__(self, sentence: str, rank: int) -> None:
        self.rank = rank
        super().__init__(sentence)

    def __reduce__(self) -> tuple[type[RankFailed], tuple[str, int]]:
        return type(self), (str(self), self.rank)  # the engine's process sends it to the server


Message = Progressed | RankWaits | Done | Raised


@dataclass(frozen=True, slots=True, eq=False)
class _Rank:
    """One rank. last_lines: of its stdout and stderr"""

    number: int
    process: BaseProcess
    commands: Connection
    last_lines: deque[str]
    listener: threading.Thread


class RankProcesses:
    """Running ranks, each in a process of its own. has_work: of the engines, after their last answer"""

    def __init__(self) -> None:
        self.has_work = False
        self._folder = tempfile.mkdtemp(prefix="rocm_attn_ranks_")
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        # The thread that waits for the lock holds the next turn. Otherwise a thread that steps would take the lock
        # again and again before another one that wants a report is awake.
        self._next_turn, self._lock = threading.Lock(), threading.Lock()
        self._awaited = ""  # the method that was called last
        self._is_calling = False  # from a command until all ranks have answered it
        self._answers: dict[int, Done | Raised] = {}
        self._troubled: dict[int, tuple[str, float]] = {}  # rank -> its error, and until when others may raise

    @property
    def store(self) -> str:
        """The file through which the ranks find each other."""
        return str(Path(self._folder) / "store")

    def start(self, setups: Sequence[RankSetup]) -> RequestLimits:
        """Starts the ranks, one for each setup, and waits until all of them have built their engines.

        Returns the limits of the engines.

        Raises RankFailed, and the exception that all ranks raise while they load their parts; then there are no ranks.
        """
        atexit.register(self.kill)  # before multiprocessing waits for its children
        try:
            for setup in setups:
                self._start(setup)
            self._is_calling, self._awaited = True, "while its engine was built"
            limits: RequestLimits = self._collect(_no_progress)[0]
        except BaseException:
            self.kill()
            raise
        return limits

    @property
    def is_alive(self) -> bool:
        """True if there are ranks."""
        return bool(self._ranks)

    def call(self, method: str, *arguments: Any, on_progress: OnProgress | None = None) -> Any:
        """Does the same as call_all(), and returns rank 0's result."""
        return self.call_all(method, *arguments, on_progress=on_progress)[0]

    def call_all(self, method: str, *arguments: Any, on_progress: OnProgress | None = None) -> list[Any]:
        """Calls a method of every rank's engine, and returns all results. Ranks other than 0 return only booleans.

        A call of another thread waits until this one has ended, and comes before the next one of this thread.
        Raises the exception that all ranks raise, BadRequest for arguments that cannot be sent, and RankFailed, after
        which there are no ranks. An interrupt, or an exception of on_progress, leaves no ranks either.
        """
        command = pickled(Command(method, arguments))
        with ExitStack() as turn:
            with self._next_turn:
                turn.enter_context(self._lock)
            self._require_whole()
            self._is_calling, self._awaited = True, f"in {method}()"
            try:
                for rank in self._ranks:
                    try:
                        rank.commands.send_bytes(command)
                    except OSError:
                        self._fail_of_dead(rank)
                return self._collect(on_progress if on_progress is not None else _no_progress)
            finally:
                if self._is_calling:
                    self.kill()

    def close(self) -> None:
        """Ends the ranks; those that are busy, or do not end by themselves, are killed."""
        if not self._is_calling:
            for rank in self._ranks:
                with suppress(OSError):
                    rank.commands.send(CLOSE)
            for rank in self._ranks:
                rank.process.join(_END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Ends the ranks at once. Does nothing if there are none."""
        atexit.unregister(self.kill)
        ranks, self._ranks, self.has_work, self._is_calling = self._ranks, [], False, False
        for rank in ranks:
            rank.process.kill()
        until = time.monotonic() + _END_SECONDS
        for rank in ranks:
            # After a fault of its GPU, the kernel may hold a process for minutes: requests do not wait for its end.
            rank.process.join(max(0.0, until - time.monotonic()))
            rank.listener.join(_WORDS_SECONDS)
            rank.commands.close()
        self._selector.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, setup: RankSetup) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        words, written = context.Pipe(duplex=False)
        process = context.Process(target=run_rank, args=(setup, theirs, written), name=f"rank {setup.rank}")
        process.start()
        theirs.close()  # so that a pipe ends when the process does
        written.close()
        last_lines = deque[str](maxlen=_KEPT_LINES)
        listener = threading.Thread(target=_listen, args=(words, setup.rank, last_lines), daemon=True)
        listener.start()
        rank = _Rank(setup.rank, process, ours, last_lines, listener)
        self._ranks.append(rank)
        self._selector.register(ours, selectors.EVENT_READ, rank)
        self._selector.register(process.sentinel, selectors.EVENT_READ, rank)

    def _collect(self, on_progress: OnProgress) -> list[Any]:
        """The answers of all ranks, in the order of ranks. Raises as call_all() does."""
        while len(self._answers) < len(self._ranks):
            deadline = min((when for _, when in self._troubled.values()), default=math.inf)
            seconds = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            for key, _ in self._selector.select(seconds):
                message = self._hear(key.data, key.fileobj)
                if isinstance(message, Progressed):
                    on_progress(*message.arguments)
            if time.monotonic() >= deadline and len(self._answers) < len(self._ranks):
                self._fail_of_trouble()
        self._require_whole()  # close() in another thread ends a call
        errors = [answer.error for answer in self._answers.values() if isinstance(answer, Raised)]
        if errors and (len(errors) < len(self._ranks) or len(set(map(type, errors))) > 1):
            self._fail_of_trouble()
        first, values = self._answers[0], [self._answers[rank.number] for rank in self._ranks]
        self.has_work, self._answers, self._troubled, self._is_calling = first.has_work, {}, {}, False
        if isinstance(first, Raised):
            raise first.error
        return [answer.value for answer in values if isinstance(answer, Done)]

    def _hear(self, rank: _Rank, source: object) -> Message:
        """Receives a rank's message, and keeps it if it is an answer. Raises RankFailed if the rank is dead."""
        try:
            if source is not rank.commands and not rank.commands.poll():
                raise EOFError
            message: Message = rank.commands.recv()
        except (EOFError, OSError):
            self._fail_of_dead(rank)
        if isinstance(message, RankWaits):
            self._troubled.pop(rank.number, None)
            if message.reason:
                self._troubled[rank.number] = (message.reason, time.monotonic() + AGREE_SECONDS)
        elif not isinstance(message, Progressed):
            self._answers[rank.number] = message
            if isinstance(message, Raised):
                # A request is refused before any collective: the others will answer, once they have compiled it.
                seconds = math.inf if isinstance(message.error, BadRequest) else GRACE_SECONDS
                self._troubled[rank.number] = (in_words(message.error), time.monotonic() + seconds)
        return message

    def _require_whole(self) -> None:
        """Raises RankFailed if there are no ranks."""
        if not self._ranks:
            raise RankFailed("the ranks of this engine were ended; make another engine", 0)

    def _fail_of_dead(self, rank: _Rank) -> NoReturn:
        rank.process.join(_WORDS_SECONDS)
        rank.listener.join(_WORDS_SECONDS)
        how = how_it_ended(rank.process.exitcode)
        awaited, lines = self._awaited, [line for line in rank.last_lines if line.strip()]
        self.kill()
        last = f"; its last output was: {lines[-1].strip()}" if lines else ""
        raise RankFailed(f"rank {rank.number} {how} {awaited}, and all ranks were ended{last}", rank.number)

    def _fail_of_trouble(self) -> NoReturn:
        """Raises RankFailed for the lowest rank that has raised, or that waits in vain."""
        number, (reason, _) = min(self._troubled.items())
        awaited, answer = self._awaited, self._answers.get(number)
        self.kill()
        if isinstance(answer, Raised):
            raise RankFailed(
                f"rank {number} raised {reason} {awaited} and other ranks did not, so they are out of step; all "
                "ranks were ended",
                number,
            ) from answer.error
        raise RankFailed(
            f"rank {number} could not make a graph {awaited} ({reason}), and the others wait for it at another "
            "place; all ranks were ended",
            number,
        )


def _no_progress(*arguments: Any) -> None:
    """Shows no progress."""


def _listen(words: Connection, rank: int, last_lines: deque[str]) -> None:
    """Passes on the output of a rank, line by line, until it ends."""
    with words, open(words.fileno(), encoding="utf-8", errors="replace", closefd=False) as lines:
        for line in lines:
            last_lines.append(line.rstrip("\n"))
            with suppress(ValueError, OSError, AttributeError):  # a stderr that is closed, or none
                sys.stderr.write(f"rank {rank}: {line}")
                sys.stderr.flush()
