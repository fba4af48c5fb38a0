"""Synthetic requests: Poisson arrivals and log-normal lengths, the same ones for a seed."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from rocm_attn.batch.step_batch import INT32_MAX
from rocm_lab.bench.request_trace import PREFIX_BLOCK, RequestTrace, TracedRequest

_MOST_BLOCKS = -(-INT32_MAX // PREFIX_BLOCK)  # of a prompt


@dataclass(frozen=True, slots=True)
class Traffic:
    """The distribution of requests.

    rate:          mean arrivals per second
    prompt_tokens: the median
    output_tokens: the median
    spread:        standard deviation of the logarithm of lengths; 0: all have the median; none is above INT32_MAX
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
        return RequestTrace.of(self.requests(seed))

    def requests(self, seed: int) -> Iterator[TracedRequest]:
        """Yields the requests of trace(), made one by one: there may be more than memory has room for."""
        chooser = random.Random(seed)
        arrival, shared = 0.0, range(self.shared_tokens // PREFIX_BLOCK)
        for number in range(self.num_requests):
            prompt = _length(chooser, self.prompt_tokens, self.spread)
            blocks = -(-prompt // PREFIX_BLOCK) if shared else 0
            # Blocks that are not shared have unique ids.
            own = (len(shared) + number * _MOST_BLOCKS + block for block in range(len(shared), blocks))
            prefix = (*shared[:blocks], *own)
            yield TracedRequest(arrival, prompt, _length(chooser, self.output_tokens, self.spread), prefix)
            arrival += chooser.expovariate(self.rate)


def _length(chooser: random.Random, median: int, spread: float) -> int:
    drawn = round(median * math.exp(chooser.gauss(0.0, spread) if spread else 0.0))
    return min(max(1, drawn), INT32_MAX)
