"""What sequences take of a step: how many of the tokens that were picked for them, and whether they end with these.

It is found before any of it is taken, with the places that the tokens come to. So it can be taken again where an
interrupt has come in between, and each token is taken once.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

from rocm_attn.errors import BadLogits
from rocm_attn.runner.request import ALL_READ, FinishReason, Sequence

# Of each sequence that picks, as of StepPicks.read.
Picks = Many[Many[int] | BadLogits]

# Taken.first of a sequence that takes nothing at all.
NOWHERE = -1


class Taken(NamedTuple):
    """What a sequence got of a step.

    token_ids: at least one, or none where it has failed, or where its round went on from what it has not taken
    reason:    why it has ended; None: it goes on
    first:     the place of the first of them in its text, its prompt included; NOWHERE: it has ended before
    """

    token_ids: tuple[int, ...]
    reason: FinishReason | None
    first: int


_NOTHING = Taken((), None, NOWHERE)


def taken_of(sequence: Sequence, pick: Many[int] | BadLogits) -> Taken:
    """What a sequence takes of a pick. A token that ends it is its last one, whatever comes after it."""
    if sequence.unread_at == ALL_READ:
        return _NOTHING
    first = len(sequence.token_ids)
    if isinstance(pick, BadLogits):
        return Taken((), "error", first)
    if first + len(pick) < sequence.most_tokens and sequence.stops.isdisjoint(pick):
        return Taken(tuple(pick), None, first)
    for num, token in enumerate(pick, 1):
        if token in sequence.stops:
            return Taken(tuple(pick[:num]), "stop", first)
        if first + num >= sequence.most_tokens:
            return Taken(tuple(pick[:num]), "length", first)
    return Taken(tuple(pick), None, first)
