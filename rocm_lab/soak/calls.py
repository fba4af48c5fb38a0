"""Calls: what a call may do, whatever it is: be taken and be right, be reported, or be refused and change nothing."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from rocm_attn.errors import DeviceFault, RocmAttnError
from rocm_lab.soak.finding import Finding

T = TypeVar("T")


class Refused:
    """The result of call() for a call that was refused."""


REFUSED: Final = Refused()
LAST_CALLS = 12  # before a finding that are reported


class Calls(ABC):
    """Makes calls, and judges them.

    rng:      the seed's random numbers
    provoked: whether a call gave the device values that it must report
    log:      the calls so far, in words
    counts:   calls that were taken, refused and reported; tokens that were compared
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._turns: dict[str, int] = {}
        self.provoked = False
        self.log: list[str] = []
        self.counts = {"taken": 0, "refused": 0, "reported": 0, "compared": 0}

    @abstractmethod
    def state(self) -> object:
        """Returns the state that a refused call must leave unchanged."""

    @abstractmethod
    def compare_pool(self, what: str) -> None:
        """Every token of every live request lies in its page as it was stored. Raises Finding."""

    @abstractmethod
    def check_device(self) -> None:
        """Raise DeviceFault for what went wrong and was not reported yet."""

    def one_of(self, what: str, options: Sequence[T]) -> T:
        """One of a call's ways, all of them in turn from a random one on."""
        turn = self._turns.get(what, self.rng.randrange(len(options)))
        self._turns[what] = turn + 1
        return options[turn % len(options)]

    def say(self, what: str) -> None:
        """Add a line to the log."""
        self.log.append(what)

    def call(self, what: str, function: Callable[[], Any], *, wrong: str = "", right: bool = False) -> Any:
        """Returns the result of a call, or REFUSED if it was refused; then nothing may have changed.

        wrong: why it must be refused; right: it must not be
        """
        before = self.state()
        try:
            given = function()
        except DeviceFault as fault:
            self.heard(fault)
            self._unchanged(before, what, fault)
            return REFUSED
        except RocmAttnError as refusal:
            self.say(f"{what}: refused, {type(refusal).__name__}: {str(refusal).splitlines()[0][:140]}")
            self.counts["refused"] += 1
            self._unchanged(before, what, refusal)
            if right:
                raise Finding(f"{what} was refused: {refusal}") from refusal
            return REFUSED
        except (Finding, KeyboardInterrupt):
            raise
        except Exception as error:
            raise Finding(f"{what} raised {type(error).__name__}: {str(error).splitlines()[:1]}") from error
        self.say(f"{what}: taken")
        self.counts["taken"] += 1
        if wrong:
            raise Finding(f"{what} was taken, although {wrong}")
        return given

    def heard(self, fault: DeviceFault) -> None:
        """A fault was reported."""
        self.say(f"reported: {str(fault).splitlines()[0][:140]}")
        self.counts["reported"] += 1
        if not self.provoked:
            raise Finding(f"a fault that nothing explains: {str(fault).splitlines()[0]}")

    def listen(self) -> bool:
        """Ask the device for faults; whether it had one."""
        for requested in range(4):
            try:
                self.check_device()
            except DeviceFault as fault:
                self.heard(fault)
            else:
                return requested > 0
        raise Finding("check_device() raises again and again")

    def _unchanged(self, before: object, what: str, why: Exception) -> None:
        if self.state() != before:
            raise Finding(f"{what} was refused, and yet something changed: {before} -> {self.state()}") from why
        self.compare_pool(f"{what}, which was refused,")
