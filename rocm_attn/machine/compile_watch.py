"""Warns of a compile of Triton that hangs, in the engine of rocm-serve and in vLLM and SGLang alike."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import IO

from rocm_attn.machine.watchdog import Watchdog

# The slowest kernel of this project takes a tenth of it.
COMPILE_SECONDS = 120.0


class CompileWatch(Watchdog):
    """A watchdog of compiles, one at a time in a thread. A compile that raised is not reported."""

    def __init__(
        self, seconds: float, *, stream: IO[str] | None = None, on_hang: Callable[[str], object] | None = None
    ) -> None:
        super().__init__(seconds, stream=stream, on_hang=on_hang)
        self._timers: dict[int, threading.Timer] = {}

    def begins(self, name: str) -> None:
        """Called before this thread compiles a kernel."""
        self.ended()
        thread = threading.get_ident()
        timer = self._timers[thread] = threading.Timer(self._seconds, self._report_if_compiling, (name, thread))
        timer.daemon = True
        timer.start()

    def ended(self) -> None:
        """Called when this thread has compiled a kernel."""
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
def watch_compiles() -> None:
    """Watches all compiles of this process from now on. Imports Triton; does nothing without it."""
    try:
        from rocm_attn.kernels.compile_only import hook_compiles
    except ImportError:
        return
    watch = CompileWatch(COMPILE_SECONDS)
    hook_compiles(watch.begins, watch.ended)
