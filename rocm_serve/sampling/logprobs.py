"""Logprobs: the probability that the model gave a new token, and the tokens it found likeliest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Most tokens in TokenLogprobs.likeliest.
MOST_LIKELIEST = 20
# Request.logprobs of a request without logprobs.
NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities in one place, as the model returns them.

    They are computed from the model's own logits: before temperature, penalties, biases and constraints.

    token_id: the new token
    logprob:  its own
    likeliest: (token id, logprob) of the likeliest tokens, the best first, and of equal ones the lowest id; the new
               token need not be one of them
    """

    token_id: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


def logprobs_of(token_id: int, ids: Sequence[int], numbers: Sequence[float], num: int) -> TokenLogprobs:
    """The logprobs of a token, as launch_likeliest has found them.

    ids, numbers: a line of its result, as integers and as numbers
    num:          of likeliest tokens that are wanted; there may be fewer
    """
    num = min(num, (len(ids) - 1) // 2)
    pairs = zip(ids[1 : 1 + 2 * num : 2], numbers[2 : 2 + 2 * num : 2], strict=True)
    likeliest = sorted((pair for pair in pairs if pair[1] > -math.inf), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(token_id, numbers[0], tuple(likeliest))
