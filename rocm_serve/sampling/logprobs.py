"""Logprobs: the probability that the model gave a new token, and the tokens it found likeliest."""

from __future__ import annotations

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
