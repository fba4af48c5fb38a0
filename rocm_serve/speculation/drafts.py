"""Drafts: the proposed next tokens of a sequence, as a chain or a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

# The parent of a draft that comes right after the sequence's last token.
LAST_TOKEN = -1
# The place of drafts that were not drawn: the likeliest ones, or those found in the text.
NOT_DRAWN = -1


# Not frozen: each text has drafts in each step, and setting the fields of a frozen class takes three times as long.
@dataclass(slots=True, unsafe_hash=True)
class DraftTree:
    """A tree of tokens after a sequence's last one. A chain is a tree without branches. Not to be changed.

    token_ids: of the drafts
    parents:   draft -> the draft that it comes after, which stands before it, or LAST_TOKEN
    place:     of drawn drafts, their sequence's place in the round; else NOT_DRAWN
    is_chain:  whether each comes after the one before it
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    place: int = NOT_DRAWN
    is_chain: bool = field(init=False)

    def __post_init__(self) -> None:
        parents = self.parents
        assert len(parents) == len(self.token_ids)
        is_chain = parents == _one_after_another(len(parents))
        assert is_chain or all(LAST_TOKEN <= parent < draft for draft, parent in enumerate(parents))
        self.is_chain = is_chain

    @classmethod
    def chain(cls, token_ids: tuple[int, ...], place: int = NOT_DRAWN) -> DraftTree:
        """Drafts of which each comes after the one before it."""
        made = cls.__new__(cls)  # the checks of parents hold for these
        made.token_ids, made.parents, made.place = token_ids, _one_after_another(len(token_ids)), place
        made.is_chain = True
        return made

    def __len__(self) -> int:
        return len(self.token_ids)

    def depths(self) -> list[int]:
        """draft -> the number of tokens between it and the sequence's last one, plus 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == LAST_TOKEN else depths[parent] + 1)
        return depths

    def first_branches(self) -> list[int]:
        """draft -> the number of drafts after the last token that stand before the one that it descends from."""
        branches, num = list[int](), 0
        for parent in self.parents:
            branches.append(num if parent == LAST_TOKEN else branches[parent])
            num += parent == LAST_TOKEN
        return branches

    def first(self, num: int) -> DraftTree:
        """The first `num` of them, which are a tree too."""
        return self if num == len(self.token_ids) else DraftTree(self.token_ids[:num], self.parents[:num], self.place)

    def after(self, draft: int, token_id: int) -> int | None:
        """The first draft of this token that comes after a draft, or after LAST_TOKEN; None if there is none."""
        for number in range(draft + 1, len(self.token_ids)):
            if self.parents[number] == draft and self.token_ids[number] == token_id:
                return number
        return None

    @classmethod
    def tree(cls, branches: Sequence[Sequence[int]]) -> DraftTree:
        """The drafts of branches that begin after the last token, with different ones. The likeliest comes first."""
        parents: list[int] = []
        for branch in branches:
            parents += [LAST_TOKEN, *range(len(parents), len(parents) + len(branch))][: len(branch)]
        return cls(tuple(token for branch in branches for token in branch), tuple(parents))


@cache
def _one_after_another(num: int) -> tuple[int, ...]:
    """The parents of a chain of `num` drafts."""
    return tuple(range(LAST_TOKEN, num - 1))


NO_DRAFTS = DraftTree((), ())
