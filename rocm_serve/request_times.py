"""RequestTimes: when requests are taken, begin, and get tokens, and the metrics of these times."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from rocm_attn.step.metrics import Durations, Metrics


@dataclass(slots=True, eq=False)
class RequestTimes:
    """The times of one request, in seconds of time.perf_counter(); 0 for events that have not come yet."""

    taken: float = field(default_factory=time.perf_counter)
    first_step: float = 0.0
    last_token: float = 0.0

    @property
    def queue_seconds(self) -> float:
        """Seconds from taking it to its first step; 0 if it had none."""
        return self.first_step - self.taken if self.first_step else 0.0

    def begin(self, queue_seconds: Durations) -> None:
        """Records that it is in the next step. A request that begins again after a preemption has waited once."""
        if not self.first_step:
            self.first_step = time.perf_counter()
            queue_seconds.note(self.first_step - self.taken)


def note_tokens(times: Iterable[RequestTimes], now: float, metrics: Metrics) -> None:
    """Records that each of these requests has got a token now. Those with the same last time are noted together."""
    num_since: dict[float, int] = {}
    for each in times:
        last = each.last_token
        each.last_token = now
        if last in num_since:
            num_since[last] += 1
        elif last:
            num_since[last] = 1
        else:
            metrics.first_token_seconds.note(now - each.taken)
    for last, num in num_since.items():
        metrics.token_gap_seconds.note(now - last, num)
