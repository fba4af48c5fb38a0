"""Durations: how long something took each time, as counts in buckets that are the same for ever.

Counts of several servers, and of one server at several moments, can be added and subtracted.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

# Upper bounds in seconds, 1-2-5 from 10 us to 500 s; what took longer is in the last bucket, which has none.
BOUNDS = tuple(digit * 10.0**power for power in range(-5, 3) for digit in (1, 2, 5))


@dataclass(slots=True)
class Durations:
    """Counts, and a sum. Noting one takes less than a microsecond, and no memory.

    counts:  of each bucket of BOUNDS, bounds included, and of what took longer
    total:   seconds, of all together
    longest: seconds
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0
    longest: float = 0.0

    def note(self, seconds: float, times: int = 1) -> None:
        """It took so long, so many times."""
        self.counts[bisect_left(BOUNDS, seconds)] += times
        self.total += seconds * times
        if seconds > self.longest:
            self.longest = seconds

    @property
    def count(self) -> int:
        """How often."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Seconds that this share of all took at most: the bound of a bucket, or the longest of all."""
        left = share * self.count
        for bound, count in zip(BOUNDS, self.counts, strict=False):
            left -= count
            if left <= 0:
                return min(bound, self.longest)
        return self.longest

    def copy(self) -> Durations:
        """Durations that do not change when these do."""
        return Durations(list(self.counts), self.total, self.longest)

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {
            "count": self.count,
            "total": self.total,
            "p50": self.quantile(0.5),
            "p99": self.quantile(0.99),
            "longest": self.longest,
        }

    def __bool__(self) -> bool:
        return self.longest > 0

    def __str__(self) -> str:
        """In words."""
        return f"p50 {_span(self.quantile(0.5))}, p99 {_span(self.quantile(0.99))}, longest {_span(self.longest)}"


def _span(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{1e3 * seconds:.4g} ms"
