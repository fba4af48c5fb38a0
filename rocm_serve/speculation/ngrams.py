"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the last tokens.

Texts that repeat themselves or their prompt, like edited code, get most of their tokens this way, without a draft
model. The method is known as prompt lookup decoding, and as n-gram speculation.
"""

from collections import defaultdict
from collections.abc import Iterable, Set
from collections.abc import Sequence as Many
from itertools import pairwise

from rocm_serve.request import Sequence
from rocm_serve.speculation.drafts import DraftTree
from rocm_serve.speculation.speculation import Drafter

# The last two tokens are looked up: one is too little evidence. Places with the most equal tokens before them are
# taken, counted up to this number.
_LONGEST = 4
# Only the last places up to this number are compared.
_MOST_PLACES = 64
# Tokens that one step looks at, about a millisecond's: a long prompt must not delay the other sequences.
MOST_LOOKED_AT = 4096


class NgramDrafter(Drafter):
    """Drafts from the sequence's own text. num_branches: continuations that a tree may have; 1: chains"""

    def __init__(self, num_branches: int) -> None:
        self._num_branches = num_branches
        self._texts: dict[int, _Text] = {}

    def draft(self, decoding: Iterable[tuple[Sequence, int]], alive: Set[int]) -> dict[int, DraftTree]:
        texts = self._texts
        if not texts.keys() <= alive:
            for number in texts.keys() - alive:
                del texts[number]
        found: dict[int, DraftTree] = {}
        for sequence, most in decoding:
            number = sequence.number
            text = texts.get(number)
            if text is None:
                text = texts[number] = _Text()
            if self._num_branches == 1:
                chain = text.continuation(sequence.token_ids, most)
                if chain:
                    found[number] = DraftTree.chain(tuple(chain))
                continue
            branches = text.continuations(sequence.token_ids, most, self._num_branches)
            if branches:
                found[number] = DraftTree.tree(branches)
        return found


class _Text:
    """A sequence's pairs of tokens, each with the places after it in order.

    One entry per token. A long prompt is looked at in the steps after it, a part in each.
    """

    __slots__ = ("_num_drafted", "_num_seen", "_place", "_places")

    def __init__(self) -> None:
        self._places: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._num_seen = 1
        self._place = 0  # found by the last continuation(); 0: nothing
        self._num_drafted = 0  # tokens that there were then

    def continuation(self, token_ids: Many[int], most: int) -> list[int]:
        """The tokens after an earlier occurrence of the last ones. A text that followed its drafts continues there.

        Among several places, the last one with the most equal tokens before it is used.
        """
        before, num = self._place, self._num_drafted
        place = before + len(token_ids) - num
        if not before or token_ids[num:] != token_ids[before:place]:
            place = self._found(token_ids)
        self._place, self._num_drafted = place, len(token_ids)
        return _copied(token_ids, place, most) if place else []

    def _found(self, token_ids: Many[int]) -> int:
        """The place after an earlier occurrence of the last tokens; 0: there is none."""
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
        """Like continuation(), latest first: distinct continuations, with `most` tokens in all.

        The first has the tokens that the others leave.
        """
        if len(token_ids) < 2:
            return []
        self._look_at(token_ids)
        found: dict[int, list[int]] = {}  # number of equal tokens -> places
        for place in self._places.get((token_ids[-2], token_ids[-1]), [])[: -_MOST_PLACES - 1 : -1]:
            found.setdefault(_num_same(token_ids, place), []).append(place)
        if not found:
            return []
        return _cut([_copied(token_ids, place, most) for place in found[max(found)]], most, num_branches)

    def _look_at(self, token_ids: Many[int]) -> None:
        """Notes the pairs that have a token after them now."""
        places, first = self._places, self._num_seen - 1
        end = min(len(token_ids) - 1, self._num_seen + MOST_LOOKED_AT)
        for place, pair in enumerate(pairwise(token_ids[first:end]), first + 2):
            places[pair].append(place)
        self._num_seen = max(self._num_seen, end)


def _num_same(token_ids: Many[int], place: int) -> int:
    """Number of tokens before a place that are equal to those before the end, from 2 to _LONGEST."""
    num = 2
    while num < _LONGEST and place > num and token_ids[place - num - 1] == token_ids[-num - 1]:
        num += 1
    return num


def _copied(token_ids: Many[int], place: int, num: int) -> list[int]:
    """The tokens from a place on; past the end the copied ones repeat, like in a text that goes round in a circle."""
    copied = list(token_ids[place : place + num])
    if len(copied) < num:
        copied = (copied * (num // len(copied) + 1))[:num]
    return copied


def _cut(candidates: list[list[int]], most: int, num_branches: int) -> list[list[int]]:
    """The first candidates that begin differently, cut so that they have `most` tokens together."""
    distinct: dict[int, list[int]] = {}
    for candidate in candidates:
        distinct.setdefault(candidate[0], candidate)
    branches = list(distinct.values())[:num_branches]
    of_each = most // len(branches)
    return [branches[0][: most - of_each * (len(branches) - 1)], *(branch[:of_each] for branch in branches[1:])]
