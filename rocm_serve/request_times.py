"""Measures requests and steps: queue time, time to first token, time between tokens, step time; with their metrics."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

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


class StepTimes:
    """The times of an engine's steps. metrics: receive them"""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._last_read = metrics, 0.0

    def note(self, started: float, launched: float, got: Sequence[RequestTimes], num_tokens: int, now: float) -> float:
        """Records that a step was read; returns the seconds that it took.

        The device was not waited for at its launch. Steps that overlap are not counted twice.
        started, launched: see PendingStep
        got:        of requests that have got tokens from it
        num_tokens: of all these
        now:        in seconds of time.perf_counter()
        """
        metrics = self._metrics
        seconds = now - max(started, self._last_read)
        self._last_read = now
        metrics.seconds += seconds
        metrics.step_seconds.note(seconds)
        metrics.host_seconds.note(launched - started)
        self._note_tokens(got, now)
        if num_tokens > len(got):
            metrics.token_gap_seconds.note(0.0, num_tokens - len(got))
        return seconds

    def _note_tokens(self, got: Sequence[RequestTimes], now: float) -> None:
        """Records that each of these requests has got a token. Those with the same last time are noted together."""
        metrics, before = self._metrics, [each.last_token for each in got]
        for each in got:
            each.last_token = now
        for last, same in groupby(sorted(before)):
            if last:
                metrics.token_gap_seconds.note(now - last, len(list(same)))
        if 0.0 in before:
            for each, last in zip(got, before, strict=True):
                if not last:
                    metrics.first_token_seconds.note(now - each.taken)
