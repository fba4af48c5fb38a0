"""The errors that a caller can act on. Each message says what was given, what is allowed and what to do."""

from __future__ import annotations

from collections.abc import Sequence


class RocmAttnError(Exception):
    """Base of all errors that this package raises on purpose."""


class Unsupported(RocmAttnError):
    """No kernel serves the problem.

    summary: the message without the reasons
    reasons: one sentence for each kernel that was considered: why it was refused
    """

    def __init__(self, summary: str, reasons: Sequence[str] = ()) -> None:
        self.summary, self.reasons = summary, tuple(reasons)
        super().__init__("\n  - ".join((summary, *self.reasons)))


class BadProblem(RocmAttnError, ValueError):
    """A model's attention geometry contradicts itself (heads, dims, scale, page size)."""


class BadBatch(RocmAttnError, ValueError):
    """A step that cannot be run as described: lengths that disagree, rows not admitted, pages not reserved."""


class BadTensor(RocmAttnError, ValueError):
    """A tensor with the wrong shape, dtype, device or strides."""


def no_such_layer(layer: object, count: int) -> BadTensor:
    """The error of a call for a layer that a runtime with this number of layers does not have."""
    return BadTensor(f"layer {layer!r} does not exist; the runtime has layers 0 to {count - 1}")


class CapacityExceeded(RocmAttnError):
    """Something does not fit; the message names the setting that makes room. Raised as FitsLater or NeverFits."""


class FitsLater(CapacityExceeded):
    """There is not enough free room now. Nothing was changed: free requests or drop kept pages, then call again."""


class OutOfPages(FitsLater):
    """The KV pool has too few free pages. missing: how many more must become free"""

    def __init__(self, message: str, *, missing: int = 0) -> None:
        super().__init__(message)
        self.missing = missing


class OutOfRows(FitsLater):
    """Every row of the request table is taken."""


class NeverFits(CapacityExceeded):
    """It can never fit this runtime, even an empty one. Send a smaller request, or build a runtime with more room."""


class GraphStale(RocmAttnError):
    """A captured graph reads memory that has moved since. Capture it again."""


class WrongState(RocmAttnError):
    """A call out of order, such as attend() outside of a step."""


class DeviceFault(RocmAttnError, RuntimeError):
    """An earlier step went wrong on the device. The runtime stays usable: the next step may begin.

    Each fault is reported once. If an interrupt comes while the error is being raised, the error is the interrupt's
    __context__. The call that raises it began no step and changed no KV; call again to run it.

    No sequence of the faulty step can be trusted: K and V of its new tokens may be missing, its outputs may be wrong,
    and so may everything computed from them since. The caller frees these sequences' rows, and either recomputes them
    from the tokens known before that step or fails them. Other sequences are right. A fault without a step means that
    the memory which padded sequences read was written: build a new runtime.

    step:  the number of the faulty step, as counted by runtime.faults.step_number; None if no step can be named. If one
           error reports several faults: the step of the first; `each` has them all
    rows:  table rows of its sequences in that step; a row may have been freed and admitted again since
    is_contained: True if no sequence of the step can have harmed another. It is not known which of them are wrong;
                  running each again alone shows it
    """

    def __init__(
        self, what: str, step: int | None = None, rows: Sequence[int] = (), *, is_contained: bool = False
    ) -> None:
        self.step = step
        self.rows = tuple(rows)
        self.is_contained = is_contained
        self._together: tuple[DeviceFault, ...] = ()
        super().__init__(what)

    @property
    def each(self) -> tuple[DeviceFault, ...]:
        """The faults that this error reports, one for each step."""
        return self._together or (self,)

    @classmethod
    def of_all(cls, faults: Sequence[DeviceFault]) -> DeviceFault:
        """Several faults as one, in the order given: the step of the first, the rows and messages of all."""
        if len(faults) == 1:
            return faults[0]
        rows = dict.fromkeys(row for fault in faults for row in fault.rows)
        contained = all(fault.is_contained for fault in faults)
        together = cls("\n".join(map(str, faults)), faults[0].step, tuple(rows), is_contained=contained)
        together._together = tuple(faults)
        return together


class NotCopied(RocmAttnError, TypeError):
    """An object that owns device memory cannot be copied or pickled."""


class BadModel(RocmAttnError, ValueError):
    """A model file that is missing, damaged, or of an architecture that the runner does not know."""


class BadRequest(RocmAttnError, ValueError):
    """A generation request that cannot be served, such as an empty prompt."""


class BadLogits(RocmAttnError, ArithmeticError):
    """Logits from which no token can be sampled: they hold NaN or infinity, or exclude every token."""


class BadSetting(RocmAttnError, ValueError):
    """An environment variable or option with a value that is not allowed."""


def reason_of(error: Exception) -> str:
    """The reason of an error for a sentence that names the file or address itself: an OSError's has both again."""
    strerror: str | None = getattr(error, "strerror", None)
    return strerror or str(error)
