"""Interrupts before chosen lines of the code: which lines run, and a KeyboardInterrupt at some of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

Counts = Callable[[FrameType], bool]


@dataclass
class Lines:
    """The lines that run while `traced`; an interrupt comes before some of them.

    counts:   true for a call whose lines are counted
    at:       numbers of the lines with an interrupt, in the order in which lines run
    places:   file and line of each line that has run
    num_came: number of interrupts that came
    """

    counts: Counts
    at: Container[int] = ()
    places: list[tuple[str, int]] = field(default_factory=list)
    num_came: int = 0

    @contextmanager
    def traced(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._of_call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _of_call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._of_line if self.counts(frame) else None

    def _of_line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.places.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.places) - 1 in self.at:
                self.num_came += 1
                raise KeyboardInterrupt
        return self._of_line

    def chosen(self) -> list[int]:
        """Returns the numbers of the first and of the last run of each line."""
        first = {place: number for number, place in reversed(list(enumerate(self.places)))}
        last = {place: number for number, place in enumerate(self.places)}
        return sorted({*first.values(), *last.values()})


def in_functions(*functions: Any) -> Counts:
    """The calls of these functions."""
    codes = {function.__code__ for function in functions}
    return lambda frame: frame.f_code in codes


def within(files: str, *functions: Any) -> Counts:
    """Calls in these files, while one of these functions runs. files: how their names begin"""
    codes: set[CodeType] = {function.__code__ for function in functions}

    def counts(frame: FrameType) -> bool:
        if not frame.f_code.co_filename.startswith(files):
            return False
        at: FrameType | None = frame
        while at is not None and at.f_code not in codes:
            at = at.f_back
        return at is not None

    return counts
