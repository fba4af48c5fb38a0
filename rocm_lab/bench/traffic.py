"""Synthetic requests: Poisson arrivals and log-normal lengths, the same ones for a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from rocm_lab.bench.request_trace import PREFIX_BLOCK, RequestTrace, TracedRequest


@dataclass(frozen=True, slots=True)
class Traffic:
    """The distribution of requests.

    rate:          mean arrivals per second
    prompt_tokens: the median
    output_tokens: the median
    spread:        standard deviation of the logarithm of lengths; 0: all have the median
    shared_tokens: tokens of the prefix that all prompts share, rounded down to whole blocks of PREFIX_BLOCK
    """

    num_requests: int
    rate: float
    prompt_tokens: int
    output_tokens: int
    spread: float = 0.5
    shared_tokens: int = 0

    def trace(self, seed: int) -> RequestTrace:
        """Returns the requests."""
        return RequestTrace.of(self._requests(random.Random(seed)))

    def _requests(self, chooser: random.Random) -> Iterator[TracedRequest]:
        arrival, shared = 0.0, tuple(range(self.shared_tokens // PREFIX_BLOCK))
        for number in range(self.num_requests):
            prompt = _length(chooser, self.prompt_tokens, self.spread)
            blocks = -(-prompt // PREFIX_BLOCK)
            # Blocks that are not shared have unique ids.
            own = tuple(len(shared) + number * (1 << 20) + block for block in range(len(shared), blocks))
            prefix = (*shared, *own)[:blocks] if shared else ()
            yield TracedRequest(arrival, prompt, _length(chooser, self.output_tokens, self.spread), prefix)
            arrival += chooser.expovariate(self.rate)


def _length(chooser: random.Random, median: int, spread: float) -> int:
    return max(1, round(median * math.exp(chooser.gauss(0.0, spread) if spread else 0.0)))
