"""Reads rounds that follow from each other on the device: several at a time, if nothing ends or fails in them.

Most rounds bring every sequence some tokens and end none. Their tokens are found for all sequences at once. Only a
round in which something ends, fails or has a fault is read sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from rocm_attn.batch.step_batch import Int32Array
from rocm_attn.kernels.sampling.row_results import ALL_ZERO
from rocm_serve.request import Sequence
from rocm_serve.sampling.sampling import PickedRows

# Rounds that are launched and not read when the next one is: as many as the device runs in this time, within these
# bounds. Tokens wait about as long to be returned, and new requests to begin.
AHEAD_SECONDS = 0.001
FEWEST_AHEAD, MOST_AHEAD = 2, 6
# Up to this number of stop tokens are searched for one by one.
_FEW_STOPS = 8


class Pace:
    """Chooses how many rounds are launched before the oldest is read."""

    def __init__(self) -> None:
        self.num_ahead = FEWEST_AHEAD

    def note(self, seconds: float, num_speculative_steps: int) -> None:
        """Notes that num_speculative_steps rounds were read in that time."""
        wanted = int(AHEAD_SECONDS * num_speculative_steps / seconds) if seconds > 0 else MOST_AHEAD
        self.num_ahead = min(max(wanted, FEWEST_AHEAD), MOST_AHEAD)

    @property
    def num_together(self) -> int:
        """Number of rounds that are waited for at a time."""
        return self.num_ahead // 2


class Ends:
    """The ends of the sequences of a series.

    kv_len: int64 [n]; a sequence whose round reaches this length, its drafts included, may be at its end
    """

    def __init__(self, sequences: Many[Sequence], width: int) -> None:
        self.kv_len = np.array([each.most_tokens for each in sequences], np.int64) + (width - 1)
        self._stops = np.array(sorted(frozenset[int]().union(*[each.stops for each in sequences])), np.int64)

    def none_in(self, token_ids: Int32Array, kv_len: Int32Array) -> bool:
        """True if no sequence ends with one of these tokens, after which it has these lengths."""
        stops = self._stops
        if len(stops) > _FEW_STOPS:
            if np.isin(token_ids, stops).any():
                return False
        elif any((token_ids == stop).any() for stop in stops):
            return False
        return not (kv_len >= self.kv_len).any()


class Together(NamedTuple):
    """Rounds that were read together.

    number:     of the first one in its series
    first:      per sequence, place of the first of these tokens in its text
    token_ids:  per sequence, of all these rounds
    num_tokens: of all sequences
    kv_len:     int32 [n] of the round after them
    emitted:    by the last one, see SpeculativeStep
    """

    number: int
    num_speculative_steps: int
    first: list[int]
    token_ids: list[list[int]]
    num_tokens: int
    kv_len: Int32Array
    emitted: Int32Array


def are_picked(found: PickedRows) -> bool:
    """True if a token was picked in every row."""
    ids, best = found
    # The largest logit of a row with NaN is NaN.
    return not (ids == ALL_ZERO).any() and bool(np.logical_and.reduce(np.isfinite(best)))


def is_clean(emitted: Int32Array, found: PickedRows) -> bool:
    """True if a token was picked in every row of a round, and it reported no fault. emitted: see SpeculativeStep"""
    return not emitted[:, 2].any() and are_picked(found)


def put_together(token_ids: Many[Int32Array], appended: Many[Int32Array]) -> tuple[Int32Array, list[list[int]]]:
    """The tokens that sequences take of rounds, flat, and per sequence.

    token_ids: per round, int32 [n, W]
    appended:     likewise, int32 [n], the number of them
    """
    if all((num == token_ids[0].shape[1]).all() for num in appended):  # texts that follow all their drafts
        whole = token_ids[0] if len(token_ids) == 1 else np.concatenate(token_ids, 1)
        return whole.reshape(-1), whole.tolist()
    ids = token_ids[0] if len(token_ids) == 1 else np.stack(token_ids, 1)
    num = appended[0] if len(appended) == 1 else np.stack(appended, 1)
    flat: Int32Array = ids[np.arange(ids.shape[-1], dtype=np.int32) < num[..., None]]
    in_all = num if num.ndim == 1 else num.sum(1)
    tokens, ends = flat.tolist(), in_all.cumsum().tolist()
    return flat, [tokens[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
