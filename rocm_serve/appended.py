"""Appends a step's sampled tokens to its sequences, and decides which sequences end with them."""

from __future__ import annotations

from collections.abc import Iterable, Set
from collections.abc import Sequence as Many
from typing import NamedTuple

from rocm_attn.errors import BadLogits
from rocm_serve.request import ALL_READ, FinishReason, Sequence


class Picks(NamedTuple):
    """The tokens that were picked in a step.

    token_ids: of each sequence that picks; empty if no token can be picked
    failed:    the place of such a sequence -> why
    """

    token_ids: list[list[int]]
    failed: dict[int, BadLogits]

    @classmethod
    def of(cls, picks: Iterable[list[int] | BadLogits]) -> Picks:
        """Makes them of the tokens of each sequence, or the reason why it has none."""
        token_ids, failed = list[list[int]](), dict[int, BadLogits]()
        for place, pick in enumerate(picks):
            if isinstance(pick, BadLogits):
                failed[place] = pick
            token_ids.append([] if isinstance(pick, BadLogits) else pick)
        return cls(token_ids, failed)


class Appended(NamedTuple):
    """The result of a step.

    token_ids: of each of step.picking at least one; none if it has failed, if it had ended before, or if its round went
               on from tokens that it has not taken
    reasons:   place among step.picking -> why it has ended; the others go on, or had ended before
    """

    token_ids: list[Many[int]]
    reasons: dict[int, FinishReason]


def appended_to(picking: Many[Sequence], picks: Picks, *, may_stop: bool) -> Appended:
    """Appends to each sequence its pick. A token that ends it is its last one, whatever comes after it.

    may_stop: whether a token that was picked may end a sequence
    """
    token_ids, reasons = list[Many[int]](), dict[int, FinishReason]()
    for place in picks.failed:
        if picking[place].pending_at != ALL_READ:
            reasons[place] = "error"
    for sequence, pick in zip(picking, picks.token_ids, strict=True):
        if sequence.pending_at == ALL_READ:
            token_ids.append(())
            continue
        known, most = sequence.token_ids, sequence.most_tokens
        num = len(known) + len(pick)
        if num >= most or (may_stop and not sequence.stops.isdisjoint(pick)):
            pick, reasons[len(token_ids)] = _up_to_end(pick, sequence.stops, most - len(known))
            num = len(known) + len(pick)
        known.fromlist(pick)
        sequence.num_stored, sequence.pending_at = num - 1, ALL_READ
        token_ids.append(pick)
    return Appended(token_ids, reasons)


def _up_to_end(pick: list[int], stops: Set[int], most: int) -> tuple[list[int], FinishReason]:
    """The tokens up to the one that ends a sequence, and why. most: the sequence ends with this number of tokens"""
    for num, token in enumerate(pick, 1):
        if token in stops:
            return pick[:num], "stop"
        if num == most:
            break
    return pick[:most], "length"
