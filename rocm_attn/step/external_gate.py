"""ExternalGate: what every access to an engine's pages, tables and steps passes.

It knows which thread has a step, which step that is, and whether graphs read the memory.

A step is the thread's that has begun it, until that thread begins another one or has ended. An engine says nowhere that
a step is over: its graphs run without a call. So another thread is refused until it says, by take_over(), that the
first one is done.
"""

from __future__ import annotations

from threading import get_ident

from rocm_attn.errors import WrongState
from rocm_attn.paging.adopted import AdoptedGuards
from rocm_attn.step.external_runs import ExternalRun
from rocm_attn.step.external_step import ExternalStep
from rocm_attn.step.gate import StepHolder

# No thread has this number.
_NO_THREAD = -1


class ExternalGate:
    """Of one ExternalAttention.

    guards:    the safeguards of its tables and pages
    is_sealed: whether graphs may read its memory, tables and pages
    run, step: what was begun last; step is None before the first one
    """

    __slots__ = ("_holder", "_is_filled", "_run", "_step", "_thread", "guards", "is_sealed")

    def __init__(self, guards: AdoptedGuards) -> None:
        self.guards = guards
        self.is_sealed = False
        self._holder = StepHolder()
        self._run: ExternalRun | None = None
        self._step: ExternalStep | None = None
        self._is_filled = False
        self._thread = _NO_THREAD

    def enter(self) -> bool:
        """The current thread is about to begin a step; whether it has one. Raises WrongState while another one has."""
        if self._holder.is_mine:
            return True
        self._holder.begin(_waits("begin()"))
        return False

    def leave(self, had_it: bool) -> None:
        """No step was begun."""
        if not had_it:
            self._holder.give_back()

    def unfill(self) -> None:
        """What was filled is about to be overwritten."""
        self._is_filled = False

    def begun(self, run: ExternalRun, step: ExternalStep) -> None:
        """The current thread has begun a step."""
        self._run, self._step, self._thread = run, step, get_ident()

    def filled(self) -> None:
        """The step that has begun was filled."""
        self._is_filled = True

    def of_begun(self) -> tuple[ExternalRun, ExternalStep]:
        """The step that the current thread has begun, and how it runs. Raises WrongState."""
        run, step = self._run, self._step
        if run is None or step is None:
            raise WrongState("there is no step to fill; call begin() first")
        if self._thread != get_ident():
            raise WrongState(_ANOTHERS)
        return run, step

    def running(self) -> ExternalRun:
        """How the step runs that the current thread has begun and filled. Raises WrongState."""
        run = self._run
        if run is None or not self._is_filled:
            raise WrongState("store and attend need a step that was begun and filled; call begin() and fill() first")
        if self._thread != get_ident():
            raise WrongState(_ANOTHERS)
        return run

    def change(self, call: str) -> None:
        """A call is about to change tables, pages or what steps are told. Raises WrongState while another thread has a
        step."""
        if not self._holder.is_mine:
            self._holder.require_free(_waits(call))

    def take_over(self) -> None:
        """The current thread has the step that was begun last, whichever thread had it."""
        if not self._holder.is_mine:
            self._holder.give_back()
            self._holder.begin(_waits("take_over()"))
            self._thread = get_ident()


_ANOTHERS = (
    "the step that has begun is another thread's; call begin() in this one, or take_over() where that one is done"
)


def _waits(call: str) -> str:
    return f"{call} is refused unless this thread calls take_over() first"
