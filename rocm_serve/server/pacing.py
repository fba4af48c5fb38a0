"""Pacing: the speed of requests, and an estimate of when another one may be served."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rocm_serve.server.job import Job

# The least and the most seconds that a client is asked to wait.
LEAST_WAIT, MOST_WAIT = 1, 60
# The weight of the newest time in the running mean.
_SHARE = 0.1


class Pacing:
    """The running mean of the time per token, waiting included."""

    def __init__(self) -> None:
        self._token_seconds = 0.0

    def note(self, seconds: float, num_tokens: int) -> None:
        """Notes that a request has produced this many tokens in this time."""
        if num_tokens:
            newest = seconds / num_tokens
            share = _SHARE if self._token_seconds else 1.0
            self._token_seconds += share * (newest - self._token_seconds)

    def retry_after(self, jobs: Iterable[Job]) -> int:
        """Returns the seconds until the first of these jobs frees a place, if it uses all the tokens that it may."""
        left = (self._token_seconds * job.most_tokens - job.age for job in jobs if job.most_tokens)
        return min(max(LEAST_WAIT, math.ceil(min(left, default=0.0))), MOST_WAIT)
