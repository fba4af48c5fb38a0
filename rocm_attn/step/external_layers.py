"""ExternalGate and ExternalLayers: which thread owns an engine's step, and the layer calls of the engine's model."""

from threading import get_ident
from typing import Any

from rocm_attn.errors import WrongState
from rocm_attn.paging.adopted import AdoptedGuards
from rocm_attn.step.external_runs import ExternalRun
from rocm_attn.step.external_step import NO_CELLS, EngineMask
from rocm_attn.step.gate import StepHolder
from rocm_attn.step.protocols import WrappedLayers

_ANOTHERS = "the running step belongs to another thread; call begin() in this one, or take_over() once that one is done"


class ExternalGate:
    """Every access to an engine's pages, tables and steps passes this gate.

    A step belongs to the thread that has begun it, until that thread begins another one or has ended. An engine does
    not report the end of a step, because its graphs run without a call. So another thread is refused until it declares,
    by take_over(), that the first one is done.

    guards:    the safeguards of tables and pages
    is_sealed: True if graphs may read memory, tables and pages, so that these must not move
    run, mask: of the step that was begun last; run is None before the first one
    is_filled: True if that step was filled
    thread:    the thread that has begun or taken over that step, and still has it; 0, which is no thread's id: none
    """

    __slots__ = ("_holder", "guards", "is_filled", "is_sealed", "mask", "run", "thread")

    def __init__(self, guards: AdoptedGuards) -> None:
        self.guards = guards
        self.is_sealed = self.is_filled = False
        self.run: ExternalRun | None = None
        self.mask: EngineMask = NO_CELLS
        self.thread = 0
        self._holder = StepHolder()

    def enter(self) -> bool:
        """Takes the step for the current thread, which is about to begin one; returns whether it had one.

        Raises WrongState while another thread has a step.
        """
        if self.thread == get_ident() or self._holder.is_mine:
            return True
        self._holder.begin(_waits("begin()"))
        self.thread = 0
        return False

    def leave(self) -> None:
        """Gives the step back: the current thread, which had none, has begun none."""
        self._holder.give_back()

    def begun(self) -> ExternalRun:
        """The run of the step that the current thread has begun. Raises WrongState."""
        run = self.run
        if run is None:
            raise WrongState("there is no step to fill; call begin() first")
        if self.thread != get_ident():
            raise WrongState(_ANOTHERS)
        return run

    def running(self) -> ExternalRun:
        """The run of the step that the current thread has begun and filled. Raises WrongState."""
        run = self.run
        if run is None or not self.is_filled:
            raise WrongState("store and attend need a running step; call begin() and fill() first")
        if self.thread != get_ident():
            raise WrongState(_ANOTHERS)
        return run

    def change(self, call: str) -> None:
        """Permits a call that changes tables, pages or inputs. Raises WrongState while another thread has a step."""
        if self.thread != get_ident() and not self._holder.is_mine:
            with self._holder.idle(_waits(call)):
                self.thread = 0

    def drop_unfilled(self) -> None:
        """Forgets a step that was begun and not filled: its rows were compared with a table that is replaced."""
        if not self.is_filled:
            self.run = None

    def take_over(self) -> None:
        """Moves the step that was begun last to the current thread, whichever thread had it."""
        if self.thread != get_ident() and not self._holder.is_mine:
            self._holder.give_back()
            self._holder.begin(_waits("take_over()"))
            self.thread = get_ident()


def _waits(call: str) -> str:
    return f"{call} is refused unless this thread calls take_over() first"


class ExternalLayers(WrappedLayers):
    """LayerCalls of the step that runs: ExternalAttention.layers. May be captured.

    Positions are places in the KV, or those of the step's mask. Each call raises BadTensor, and WrongState without a
    step that the current thread has begun and filled.
    """

    __slots__ = ("_gate",)

    def __init__(self, gate: ExternalGate) -> None:
        self._gate = gate

    def _call(self, name: str, layer: int, *given: Any, **named: Any) -> None:
        getattr(self._gate.running().layers, name)(layer, *given, **named)
