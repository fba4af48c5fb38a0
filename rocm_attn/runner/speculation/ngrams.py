"""Prompt lookup: what came after the last tokens when they were there before comes again.

Of texts that repeat themselves or their prompt, as edited code does, most tokens are guessed so, at no cost on the
device. The method is known as prompt lookup decoding, and as n-gram speculation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set
from collections.abc import Sequence as Many
from itertools import pairwise

from rocm_attn.capture.graphs import Progress
from rocm_attn.runner.request import Sequence
from rocm_attn.runner.scheduler import ScheduledStep
from rocm_attn.runner.speculation.drafts import Drafts
from rocm_attn.runner.taking import Taken

# The last two tokens are looked up: one says too little. The places where most of those before them are the same, too,
# are taken, and more than so many say no more.
_LONGEST = 4
# As many of their last places are looked at.
_MOST_PLACES = 64


class NgramDrafter:
    """Guesses by what the sequence itself holds. num_branches: continuations that a tree may have; 1: chains"""

    def __init__(self, num_branches: int) -> None:
        self._num_branches = num_branches
        self._texts: dict[int, _Text] = {}

    def draft(self, decoding: Iterable[tuple[Sequence, int]], alive: Set[int]) -> dict[int, Drafts]:
        """As Drafter.draft."""
        texts = self._texts
        if not texts.keys() <= alive:
            for number in texts.keys() - alive:
                del texts[number]
        found: dict[int, Drafts] = {}
        for sequence, most in decoding:
            number = sequence.number
            text = texts.get(number)
            if text is None:
                text = texts[number] = _Text()
            if self._num_branches == 1:
                chain = text.continuation(sequence.token_ids, most)
                if chain:
                    found[number] = Drafts.chain(tuple(chain))
                continue
            branches = text.continuations(sequence.token_ids, most, self._num_branches)
            if branches:
                found[number] = Drafts.tree(branches, most)
        return found

    @property
    def looks_up(self) -> bool:
        """As Drafter.looks_up."""
        return self._num_branches == 1

    def follow(self, step: ScheduledStep, taken: Many[Taken]) -> None:
        """As Drafter.follow: what is known of a sequence is enough."""

    def capture_all(self, progress: Progress) -> None:
        """As Drafter.capture_all."""


class _Text:
    """A sequence's pairs of tokens, each with the places after it, the last one last.

    One entry for each token: a long prompt is looked at in the step after it, and must not hold up the others.
    """

    __slots__ = ("_num_guessed", "_num_seen", "_place", "_places")

    def __init__(self) -> None:
        self._places: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._num_seen = 1
        self._place = 0  # what continuation() found the last time; 0: nothing
        self._num_guessed = 0  # tokens that there were then

    def continuation(self, token_ids: list[int], most: int) -> list[int]:
        """What came after the last tokens before. A text that has gone on as it was guessed is guessed on from there.

        Else it is where most of those before them are the same, the last time.
        """
        before, num = self._place, self._num_guessed
        place = before + len(token_ids) - num
        if not before or token_ids[num:] != token_ids[before:place]:
            place = self._found(token_ids)
        self._place, self._num_guessed = place, len(token_ids)
        return _copied(token_ids, place, most) if place else []

    def _found(self, token_ids: list[int]) -> int:
        """The place after the last tokens where they were before; 0: they were nowhere."""
        if len(token_ids) < 2:
            return 0
        self._look_at(token_ids)
        places = self._places.get((token_ids[-2], token_ids[-1]))
        if places is None:
            return 0
        best, longest = places[-1], 0
        for place in places[: -_MOST_PLACES - 1 : -1]:
            num_same = _num_same(token_ids, place)
            if num_same > longest:
                best, longest = place, num_same
                if num_same == _LONGEST:
                    break
        return best

    def continuations(self, token_ids: Many[int], most: int, num_branches: int) -> list[list[int]]:
        """As continuation(), the last time first; different ones, `most` tokens of all together.

        The first has what the others leave.
        """
        if len(token_ids) < 2:
            return []
        self._look_at(token_ids)
        found: dict[int, list[int]] = {}  # by how many tokens are the same
        for place in self._places.get((token_ids[-2], token_ids[-1]), [])[: -_MOST_PLACES - 1 : -1]:
            found.setdefault(_num_same(token_ids, place), []).append(place)
        if not found:
            return []
        return _cut([_copied(token_ids, place, most) for place in found[max(found)]], most, num_branches)

    def _look_at(self, token_ids: Many[int]) -> None:
        """Note the pairs that have a token after them now."""
        places, first = self._places, self._num_seen - 1
        for place, pair in enumerate(pairwise(token_ids[first:-1]), first + 2):
            places[pair].append(place)
        self._num_seen = max(self._num_seen, len(token_ids) - 1)


def _num_same(token_ids: Many[int], place: int) -> int:
    """Tokens before a place that are those before the end, from 2 on to _LONGEST."""
    num = 2
    while num < _LONGEST and place > num and token_ids[place - num - 1] == token_ids[-num - 1]:
        num += 1
    return num


def _copied(token_ids: Many[int], place: int, num: int) -> list[int]:
    """The tokens from a place on; past the end those that were copied, as in a text that goes round in a circle."""
    copied = list(token_ids[place : place + num])
    if len(copied) < num:
        copied = (copied * (num // len(copied) + 1))[:num]
    return copied


def _cut(candidates: list[list[int]], most: int, num_branches: int) -> list[list[int]]:
    """The first candidates that begin differently, so long that they have `most` tokens together."""
    distinct: dict[int, list[int]] = {}
    for candidate in candidates:
        distinct.setdefault(candidate[0], candidate)
    branches = list(distinct.values())[:num_branches]
    of_each = most // len(branches)
    return [branches[0][: most - of_each * (len(branches) - 1)], *(branch[:of_each] for branch in branches[1:])]
