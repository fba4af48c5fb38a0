"""The tokens that sequences take of a step's picks, and whether they end with these."""

from __future__ import annotations

from collections.abc import Sequence as Many
from collections.abc import Set
from typing import NamedTuple

from rocm_attn.errors import BadLogits
from rocm_serve.request import ALL_READ, FinishReason, Sequence

# The picks of each sequence that picks; see StepPicks.read.
Pick = Many[int] | BadLogits
Picks = list[Pick]


class Appended(NamedTuple):
    """The result of a step.

    token_ids: of each of step.picking at least one; none if it has failed, if it had ended before, or if its round went
               on from tokens that it has not taken
    reasons:   place among step.picking -> why it has ended; the others go on, or had ended before
    """

    token_ids: list[Many[int]]
    reasons: dict[int, FinishReason]


def appended_to(picking: Many[Sequence], picks: Many[Pick]) -> Appended:
    """Appends to each sequence its pick. A token that ends it is its last one, whatever comes after it."""
    token_ids, reasons = list[Many[int]](), dict[int, FinishReason]()
    for place, (sequence, pick) in enumerate(zip(picking, picks, strict=True)):
        if sequence.pending_at == ALL_READ:
            token_ids.append(())
            continue
        known = sequence.token_ids
        if isinstance(pick, BadLogits):
            pick, reasons[place] = (), "error"
        elif len(known) + len(pick) >= sequence.most_tokens or not sequence.stops.isdisjoint(pick):
            pick, reasons[place] = _up_to_end(pick, sequence.stops, sequence.most_tokens - len(known))
        known.extend(pick)
        sequence.num_stored, sequence.pending_at = len(known) - 1, ALL_READ
        token_ids.append(pick)
    return Appended(token_ids, reasons)


def _up_to_end(pick: Many[int], stops: Set[int], most: int) -> tuple[Many[int], FinishReason]:
    """The tokens up to the one that ends a sequence, and why. most: the sequence ends with this number of tokens"""
    for num, token in enumerate(pick, 1):
        if token in stops:
            return pick[:num], "stop"
        if num == most:
            break
    return pick[:most], "length"
