"""Logprobs: how likely the model found a new token, and which others it found likely."""

from __future__ import annotations

from dataclasses import dataclass

# Of the likeliest tokens of one place.
MOST_LIKELIEST = 20
# Request.logprobs of a request that wants none.
NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities in one place, as the model gives them.

    Those of the logits as they come from the model: before temperature, penalties, biases and constraints.

    token_id: the new token
    logprob:  its own
    likeliest: (token id, logprob) of the likeliest tokens, the best first, and of equal ones the lowest id; the new
               token need not be one of them
    """

    token_id: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()
