"""The tokens that sequences take of a step's picks, and whether they end with these."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

from rocm_attn.errors import BadLogits
from rocm_serve.request import ALL_READ, FinishReason, Sequence

# The picks of each sequence that picks; see StepPicks.read.
Pick = Many[int] | BadLogits
Picks = list[Pick]

# AppendedTokens.first of a sequence that takes nothing at all.
NOWHERE = -1


class AppendedTokens(NamedTuple):
    """The result of a step for a sequence.

    token_ids: at least one, or none if it has failed, or if its round went on from tokens that it has not taken
    reason:    why it has ended; None: it goes on
    first:     the place of the first of them in its text, its prompt included; NOWHERE: it has ended before
    """

    token_ids: tuple[int, ...]
    reason: FinishReason | None
    first: int


_NOTHING = AppendedTokens((), None, NOWHERE)


def appended_of(sequence: Sequence, pick: Pick) -> AppendedTokens:
    """The tokens that a sequence takes of a pick. A token that ends it is its last one, whatever comes after it."""
    if sequence.pending_at == ALL_READ:
        return _NOTHING
    first = len(sequence.token_ids)
    if isinstance(pick, BadLogits):
        return AppendedTokens((), "error", first)
    for num, token in enumerate(pick, 1):
        if token in sequence.stops:
            return AppendedTokens(tuple(pick[:num]), "stop", first)
        if first + num >= sequence.most_tokens:
            return AppendedTokens(tuple(pick[:num]), "length", first)
    return AppendedTokens(tuple(pick), None, first)
