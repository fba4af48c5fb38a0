"""Warns of a compile of Triton that hangs, in the engine of rocm-serve and in vLLM and SGLang alike."""

import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import IO

from rocm_attn.machine.watchdog import Watchdog

# The slowest kernel of this project takes a tenth of it.
COMPILE_SECONDS = 120.0


class CompileWatch(Watchdog):
    """A watchdog of compiles, one at a time in a thread. A compile that raised is not reported.

    num_compiled: kernels that were compiled, and not found in Triton's cache
    seconds:      time that threads have waited for kernels, those of the cache included
    """

    def __init__(
        self, seconds: float, *, stream: IO[str] | None = None, on_hang: Callable[[str], object] | None = None
    ) -> None:
        super().__init__(seconds, stream=stream, on_hang=on_hang)
        self._timers: dict[int, threading.Timer] = {}
        self._begun: dict[int, float] = {}
        self.num_compiled, self.seconds = 0, 0.0

    def begins(self, name: str) -> None:
        """Called before this thread compiles a kernel."""
        self._stop_timer()
        thread = threading.get_ident()
        self._begun[thread] = time.perf_counter()
        timer = self._timers[thread] = threading.Timer(self._seconds, self._report_if_compiling, (name, thread))
        timer.daemon = True
        timer.start()

    def ended(self, was_cached: bool) -> None:
        """Called when this thread has a kernel. was_cached: found in Triton's cache"""
        self._stop_timer()
        self.num_compiled += not was_cached
        begun = self._begun.pop(threading.get_ident(), None)
        if begun is not None:
            self.seconds += time.perf_counter() - begun

    def _stop_timer(self) -> None:
        timer = self._timers.pop(threading.get_ident(), None)
        if timer is not None:
            timer.cancel()

    def _report_if_compiling(self, name: str, thread: int) -> None:
        frame = sys._current_frames().get(thread)
        while frame is not None:
            if frame.f_code.co_name == "_do_compile":  # of Triton's JITFunction, which calls the hooks
                self._report(f"Triton's compile of {name}")
                return
            frame = frame.f_back


@cache
def compile_watch() -> CompileWatch:
    """The watch of this process' compiles. It sees none before watch_compiles() was called."""
    return CompileWatch(COMPILE_SECONDS)


@cache
def watch_compiles() -> None:
    """Watches and counts all compiles of this process from now on. Imports Triton; does nothing without it."""
    try:
        from rocm_attn.kernels.compile_only import hook_compiles
    except ImportError:
        return
    hook_compiles(compile_watch().begins, compile_watch().ended)
