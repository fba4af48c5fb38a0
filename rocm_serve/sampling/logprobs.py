"""Logprobs: the log probabilities of a token and of the likeliest tokens in its place."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

# Most tokens in TokenLogprobs.likeliest.
MOST_LIKELIEST = 20
# Request.logprobs of a request without logprobs.
NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The logprobs (natural logarithms) of one token and of the likeliest tokens in its place.

    They are computed from the model's raw logits: before temperature, penalties, biases and constraints.

    token_id: the token
    logprob:  its logprob
    likeliest: (token id, logprob) of the likeliest tokens, the best first, of equal ones the lowest id first; the token
               itself need not be one of them
    """

    token_id: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ManyLogprobs(Sequence[TokenLogprobs]):
    """TokenLogprobs of many places, each made when it is read: those of a long prompt are millions of objects.

    token_ids: of the places
    words:     int32 [places, 1 + 2 * num], as bytes: see launch_likeliest
    num:       of likeliest tokens of each place
    """

    token_ids: Sequence[int]
    words: bytes
    num: int

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, place: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[TokenLogprobs, ...]: ...
    def __getitem__(self, place: int | slice) -> TokenLogprobs | tuple[TokenLogprobs, ...]:
        if isinstance(place, slice):
            return tuple(self[each] for each in range(len(self))[place])
        at, size = range(len(self))[place], 4 * (1 + 2 * self.num)
        words = memoryview(self.words)[at * size : (at + 1) * size]
        return logprobs_of(self.token_ids[at], words.cast("i").tolist(), words.cast("f").tolist(), self.num)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)


def logprobs_of(token_id: int, ids: Sequence[int], numbers: Sequence[float], num: int) -> TokenLogprobs:
    """The logprobs of a token, as launch_likeliest has found them.

    ids, numbers: a line of its result, as integers and as numbers
    num:          of likeliest tokens that are wanted; there may be fewer
    """
    num = min(num, (len(ids) - 1) // 2)
    pairs = zip(ids[1 : 1 + 2 * num : 2], numbers[2 : 2 + 2 * num : 2], strict=True)
    likeliest = sorted((pair for pair in pairs if pair[1] > -math.inf), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(token_id, numbers[0], tuple(likeliest))
