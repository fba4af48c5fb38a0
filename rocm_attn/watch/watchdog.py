"""Watchdog: names what hangs, with the stacks of all threads, and lets it hang on."""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import IO, Protocol

from torch import Tensor

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.step.protocols import Steps

# A first capture may compile every kernel; one that takes longer than this has never been seen to end.
CAPTURE_SECONDS = 300.0


class Watch(Protocol):
    """Looks on while something runs that might not end."""

    def watch(self, what: str) -> AbstractContextManager[None]:
        """A context to run it in."""
        ...


class NoWatchdog:
    """Looks away."""

    def watch(self, what: str) -> AbstractContextManager[None]:
        """As Watch.watch."""
        return nullcontext()


NO_WATCHDOG = NoWatchdog()


class Watchdog:
    """Says on a stream what has not ended in time, once for each watch.

    The calls of torch and Triton that wait for a device or a compiler let other threads run, so a timer can speak up.

    seconds: how long something may take
    stream:  a file with a descriptor; not given: the process' stderr
    on_hang: called with the sentence, for instance to dump a flight recorder
    """

    def __init__(
        self, seconds: float, *, stream: IO[str] | None = None, on_hang: Callable[[str], object] | None = None
    ) -> None:
        self._seconds = seconds
        self._stream = stream
        self._on_hang = on_hang

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """As Watch.watch. Costs the start of a thread, some 0.1 ms."""
        timer = threading.Timer(self._seconds, self._report, (what,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _report(self, what: str) -> None:
        sentence = f"rocm-attn: {what} has not ended after {self._seconds:g} s"
        stream = self._stream if self._stream is not None else sys.__stderr__
        if stream is not None:
            print(sentence, file=stream, flush=True)
            faulthandler.dump_traceback(stream)
        if self._on_hang is not None:
            self._on_hang(sentence)


class WatchedSteps:
    """Runs steps under a watchdog. A replay that hangs is named by the step that waits for it, one or two later."""

    def __init__(self, steps: Steps, watchdog: Watch) -> None:
        self._steps = steps
        self._watchdog = watchdog
        self._num_steps = 0

    def run(self, batch: StepBatch, pad_to: int | None = None) -> Tensor:
        """As StepRunner.run."""
        self._num_steps += 1
        with self._watchdog.watch(f"step {self._num_steps} ({batch.num_seqs} sequences, {batch.num_tokens} tokens)"):
            return self._steps.run(batch, pad_to)
