"""Threads that compile constraints and compute the masks of their texts, and the computation of a mask."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_serve.text.constraint import library, reason_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from rocm_attn.batch.step_batch import Int32Array

# Threads of an engine for masks that take a fraction of a millisecond, and as many for others.
NUM_OF_EACH = min(8, max(2, (os.cpu_count() or 2) // 4))

_Calls = SimpleQueue[Callable[[], None] | None]


class Threads:
    """Threads that call functions in order, while others are called. They end with this object.

    most: threads; each is started when it is first needed
    """

    def __init__(self, most: int) -> None:
        self._most, self._threads = most, list[threading.Thread]()
        self._calls: _Calls = SimpleQueue()
        self._lock = threading.Lock()  # guards _threads
        weakref.finalize(self, _end, self._calls, most).atexit = False
        _alive.add(self)

    def call(self, function: Callable[[], None]) -> None:
        """Calls a function that raises nothing, and does not wait for it."""
        with self._lock:
            if len(self._threads) < self._most:
                # A daemon thread: Python waits for others before it calls end().
                thread = threading.Thread(target=_call_all, args=(self._calls,), name="rocm_attn masks", daemon=True)
                thread.start()
                self._threads.append(thread)
        self._calls.put(function)

    def end(self) -> None:
        """Calls none of the functions that wait, and returns when the others have returned."""
        with suppress(Empty):
            while True:
                self._calls.get_nowait()
        _end(self._calls, self._most)
        for thread in self._threads:
            thread.join()


_alive = weakref.WeakSet[Threads]()


@atexit.register
def _end_all() -> None:
    """The library crashes the process if it comes back to Python after its end."""
    for threads in tuple(_alive):
        threads.end()


def _call_all(calls: _Calls) -> None:
    while (function := calls.get()) is not None:
        function()
        del function  # it may hold the Threads


def _end(calls: _Calls, num: int) -> None:
    for _ in range(num):
        calls.put(None)


def mask_after(matcher: LLMatcher, new: Sequence[int], failed: LLMatcher, num_tokens: int) -> Int32Array | str:
    """int32 [num_tokens / 32, rounded up], a bit for each token that may follow these tokens of a text; or the reason
    why there is none.

    Other threads run meanwhile, however long it takes.
    failed: of the same tokenizer, in its state of error
    """
    for token in new:
        # For a lone matcher the library would hold Python's lock: a second makes it give the lock back.
        _executor().consume_token_par([(matcher, token), (failed.deep_copy(), token)])
    mask: Int32Array = np.zeros(-(-num_tokens // 32), np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return reason_of(matcher.get_error()) if matcher.is_error() else mask


@lru_cache(1)
def _executor() -> Any:
    return library().LLExecutor(2 * NUM_OF_EACH)
