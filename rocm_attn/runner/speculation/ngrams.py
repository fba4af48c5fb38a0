"""Prompt lookup: what came after the last tokens when they were there before comes again.

Of texts that repeat themselves or their prompt, as edited code does, most tokens are guessed so, at no cost on the
device. The method is known as prompt lookup decoding, and as n-gram speculation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Many

from rocm_attn.capture.graphs import Progress
from rocm_attn.runner.request import Sequence
from rocm_attn.runner.speculation.drafts import Drafts

# How many of the last tokens are looked up: the most that were there before count. A single token says too little.
_LONGEST = 4
_SHORTEST = 2
# Of each n-gram as many of its last places are looked at.
_MOST_PLACES = 16


class NgramDrafter:
    """Guesses by what the sequence itself holds. num_branches: continuations that a tree may have; 1: chains"""

    def __init__(self, num_branches: int) -> None:
        self._num_branches = num_branches
        self._texts: dict[int, _Text] = {}

    def draft(self, decoding: Iterable[tuple[Sequence, int]], alive: Collection[int]) -> dict[int, Drafts]:
        """As Drafter.draft."""
        for number in self._texts.keys() - alive:
            del self._texts[number]
        found: dict[int, Drafts] = {}
        for sequence, most in decoding:
            text = self._texts.get(sequence.number)
            if text is None:
                text = self._texts[sequence.number] = _Text()
            branches = text.continuations(sequence.token_ids, most, self._num_branches)
            if branches:
                found[sequence.number] = Drafts.tree(branches, most)
        return found

    def capture_all(self, progress: Progress) -> None:
        """As Drafter.capture_all."""


class _Text:
    """The n-grams of a sequence, each with the places after it."""

    def __init__(self) -> None:
        self._places: tuple[dict[tuple[int, ...], list[int]], ...] = tuple({} for _ in range(_SHORTEST, _LONGEST + 1))
        self._num_seen = 0

    def continuations(self, token_ids: Many[int], most: int, num_branches: int) -> list[list[int]]:
        """What came after the last tokens before, the last time first; different ones, `most` tokens of all together.

        The first has what the others leave.
        """
        self._look_at(token_ids)
        for num in range(_LONGEST, _SHORTEST - 1, -1):
            places = self._places[num - _SHORTEST].get(tuple(token_ids[-num:]))
            if places:
                return _cut(
                    [_copied(token_ids, place, most) for place in places[: -_MOST_PLACES - 1 : -1]], most, num_branches
                )
        return []

    def _look_at(self, token_ids: Many[int]) -> None:
        """Note the n-grams that have a token after them now."""
        for end in range(max(1, self._num_seen), len(token_ids)):
            for num, places in enumerate(self._places, _SHORTEST):
                if num <= end:
                    places.setdefault(tuple(token_ids[end - num : end]), []).append(end)
        self._num_seen = len(token_ids)


def _copied(token_ids: Many[int], place: int, num: int) -> list[int]:
    """The tokens from a place on; past the end those that were copied, as in a text that goes round in a circle."""
    copied = list(token_ids[place : place + num])
    period = len(token_ids) - place
    while len(copied) < num:
        copied.append(copied[len(copied) - period])
    return copied


def _cut(candidates: list[list[int]], most: int, num_branches: int) -> list[list[int]]:
    """The first candidates that begin differently, so long that they have `most` tokens together."""
    branches = list({branch[0]: branch for branch in reversed(candidates)}.values())[::-1][:num_branches]
    of_each = most // len(branches)
    return [branches[0][: most - of_each * (len(branches) - 1)], *(branch[:of_each] for branch in branches[1:])]
