"""Intervals of integers: what operations make of them, and how those that a loop carries grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rocm_lab.races.ttir import Kind, Operation

Causes = frozenset[Operation]
NO_CAUSES: Causes = frozenset()


class Range(NamedTuple):
    """An interval, and the operations that may have overflowed on the way to it."""

    low: int
    high: int
    causes: Causes = NO_CAUSES

    def join(self, other: Range) -> Range:
        """Holds the values of both."""
        return Range(min(self.low, other.low), max(self.high, other.high), self.causes | other.causes)

    def within(self, low: int, high: int) -> Range:
        """The part between two limits; the nearest number, where there is none: such a lane is not accessed."""
        return Range(min(max(self.low, low), high), max(min(self.high, high), low), self.causes)


def bits_of(kind: Kind) -> int:
    """The bits of a number of this type."""
    return 64 if kind.element == "index" else int(kind.element[1:])


def limits_of(kind: Kind) -> tuple[int, int]:
    """The least and the largest number of a type; 0 and 1 for a truth."""
    half = 1 << bits_of(kind) - 1
    return (0, 1) if half == 1 else (-half, half - 1)


def _corners(compute: Callable[[int, int], int]) -> Callable[[Range, Range], tuple[int, int] | None]:
    """The limits of a function that is monotonous in both."""

    def limits(a: Range, b: Range) -> tuple[int, int]:
        found = [compute(one, two) for one in a[:2] for two in b[:2]]
        return min(found), max(found)

    return limits


def _quotient(a: Range, b: Range) -> tuple[int, int] | None:
    if b.low <= 0 <= b.high:
        most = max(abs(a.low), abs(a.high))
        return (0 if a.low >= 0 and b.low >= 0 else -most), most
    return _corners(lambda one, two: abs(one) // abs(two) * (1 if (one >= 0) == (two >= 0) else -1))(a, b)


def _rest(a: Range, b: Range) -> tuple[int, int]:
    most = max(abs(b.low), abs(b.high)) - 1
    return max(min(a.low, 0), -most), min(max(a.high, 0), most)


def _common_bits(a: Range, b: Range) -> tuple[int, int] | None:
    positive = [each.high for each in (a, b) if each.low >= 0]
    return (0, min(positive)) if positive else None


def _all_bits(a: Range, b: Range) -> tuple[int, int] | None:
    return (0, (1 << max(a.high, b.high).bit_length()) - 1) if min(a.low, b.low) >= 0 else None


def _shifted(compute: Callable[[int, int], int]) -> Callable[[Range, Range], tuple[int, int] | None]:
    return lambda a, b: _corners(compute)(a, b) if b.low >= 0 and b.high < 64 else None


def _positive(
    compute: Callable[[Range, Range], tuple[int, int] | None],
) -> Callable[[Range, Range], tuple[int, int] | None]:
    """An operation on numbers without a sign is that on others where none is negative."""
    return lambda a, b: compute(a, b) if min(a.low, b.low) >= 0 else None


# The limits of a result that is not wrapped; None: any value of its type.
COMPUTED: dict[str, Callable[[Range, Range], tuple[int, int] | None]] = {
    "arith.addi": lambda a, b: (a.low + b.low, a.high + b.high),
    "arith.subi": lambda a, b: (a.low - b.high, a.high - b.low),
    "arith.muli": _corners(lambda a, b: a * b),
    "arith.divsi": _quotient,
    "arith.remsi": _rest,
    "arith.minsi": lambda a, b: (min(a.low, b.low), min(a.high, b.high)),
    "arith.maxsi": lambda a, b: (max(a.low, b.low), max(a.high, b.high)),
    "arith.andi": _common_bits,
    "arith.ori": _all_bits,
    "arith.xori": _all_bits,
    "arith.shli": _shifted(lambda a, b: a << b),
    "arith.shrsi": _shifted(lambda a, b: a >> b),
    "arith.shrui": _positive(_shifted(lambda a, b: a >> b)),
}
COMPUTED |= {f"arith.{name}ui": _positive(COMPUTED[f"arith.{name}si"]) for name in ("div", "rem", "min", "max")}
# No loop has more rounds: it would take a minute.
_MOST_ROUNDS = 1 << 25
# Rounds until a limit of a loop goes on to what it would be after all of them, or to the next of these steps.
_ROUNDS = 36
_STEPS = sorted(
    {
        0,
        *(
            sign * ((1 << bits) + less)
            for bits in (0, 7, 8, 15, 16, 31, 32, 63)
            for sign, less in ((-1, 0), (1, -1), (1, 0))
        ),
    }
)


def joined(found: Sequence[Range | None]) -> Range | None:
    """Holds the values of all; None stands for no value."""
    result = None
    for each in found:
        result = result.join(each) if result and each else result or each
    return result


@dataclass(slots=True)
class Growth:
    """How a number that a loop carries grows, down and up.

    by:    in a round, at most; None: not in a way that is known
    since: what it would have begun with, had it grown so from the first round on
    """

    limits: tuple[int, int]
    rounds: int = 0
    by: list[int | None] = field(default_factory=lambda: [0, 0])
    since: list[int] = field(default_factory=lambda: [0, 0])

    def after(self, before: Range | None, found: Sequence[Range | None]) -> Range | None:
        """The range after another round. found: what the loop begins with, and what a round makes of before"""
        now = joined(found)
        if before is None or now is None or len(found) == 1 or found[0] is None or found[1] is None:
            return joined((before, now))
        self.rounds += 1
        limits = []
        for side, sign in ((0, -1), (1, 1)):
            begin, old, new = (sign * each[:2][side] for each in (found[0], before, found[1]))
            by, limit = self.by[side], max(old, begin, new)
            if self.rounds > _ROUNDS and by is not None and new > old and new - old > by:
                by = self.by[side] = None if by else new - old
                self.since[side] = old - (by or 0) * self.rounds
            if self.rounds > _ROUNDS and by is None:
                limit = next((each for each in _STEPS if each >= limit), limit)
            elif self.rounds > _ROUNDS and by:
                limit = max(old, max(begin, self.since[side]) + by * _MOST_ROUNDS)
            limits.append(sign * min(limit, sign * self.limits[side]))
        return Range(limits[0], limits[1])
