"""StepHolder: which thread has a runtime's step, and how far that has come.

One thread at a time has it; another one that asks for it is refused.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

from rocm_attn.errors import WrongState

_STEP = "step"


class StepState(enum.Enum):
    """How far a runtime's step has come."""

    IDLE = "no step was begun"
    STAGED = "a step was staged and its metadata is not filled yet"
    RUNNING = "a step is running"


# Each step looks at them, and an enumeration takes its time to give a member.
IDLE, STAGED = StepState.IDLE, StepState.STAGED


class StepHolder:
    """The thread that has begun a step, or none. state: of its step"""

    __slots__ = ("_taking_over", "_thread_of", "state")

    def __init__(self) -> None:
        self.state = StepState.IDLE
        self._thread_of: dict[str, int] = {}
        self._taking_over = threading.Lock()

    @property
    def is_mine(self) -> bool:
        """Whether the current thread has the step."""
        return self._thread_of.get(_STEP) == get_ident()

    def begin(self, what_fails: str) -> None:
        """Take the step for the current thread. Raises WrongState if another one has it, or this one has begun it.

        Taking it again is harmless, so that an interrupt right after it was taken leaves nothing to clean up. A thread
        that has ended has no step.
        """
        me = get_ident()
        # setdefault looks and writes at once, whatever other threads do meanwhile.
        if self._thread_of.setdefault(_STEP, me) != me and not self._take_over(me):
            raise WrongState(
                f"{what_fails}, because another thread has begun a step and not ended it; "
                "a runtime is used by one thread at a time"
            )
        if self.state is not IDLE:
            raise WrongState(f"{what_fails}, because {self.state.value}; call end_step() first")

    def require_free(self, what_fails: str) -> None:
        """Raise WrongState if a thread has begun a step, this one or another."""
        if self._thread_of:
            self.begin(what_fails)
            self.give_back()

    @contextmanager
    def idle(self, what_fails: str) -> Iterator[None]:
        """The current thread has the step, and it is not begun. Raises WrongState."""
        self.begin(what_fails)
        try:
            yield
        finally:
            self.give_back()

    @contextmanager
    def alone(self, what_fails: str) -> Iterator[None]:
        """The current thread has the step, whether or not it is begun. Raises WrongState."""
        had_it = self.is_mine
        if not had_it:
            self.begin(what_fails)
        try:
            yield
        finally:
            if not had_it:
                self.give_back()

    def give_back(self) -> None:
        """The current thread, which has the step, has it no longer."""
        self._thread_of.clear()

    def _take_over(self, me: int) -> bool:
        with self._taking_over:
            holder = self._thread_of.get(_STEP)
            if holder is not None and any(thread.ident == holder for thread in threading.enumerate()):
                return False
            self._thread_of.pop(_STEP, None)
            return self._thread_of.setdefault(_STEP, me) == me
