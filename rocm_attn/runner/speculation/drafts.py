"""Drafts: tokens that may come next in a sequence, as they were guessed."""

from __future__ import annotations

from dataclasses import dataclass, field

# The parent of a draft that comes right after the sequence's last token.
LAST_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Drafts:
    """A tree of tokens after a sequence's last one. A chain is a tree without branches.

    token_ids: at least one
    parents:   draft -> the draft that it comes after, which stands before it, or LAST_TOKEN
    is_chain:  whether each comes after the one before it
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    is_chain: bool = field(init=False)

    def __post_init__(self) -> None:
        assert len(self.parents) == len(self.token_ids)
        assert all(LAST_TOKEN <= parent < draft for draft, parent in enumerate(self.parents))
        object.__setattr__(self, "is_chain", self.parents == tuple(range(LAST_TOKEN, len(self.parents) - 1)))

    @classmethod
    def chain(cls, token_ids: tuple[int, ...]) -> Drafts:
        """Each comes after the one before it."""
        return cls(token_ids, tuple(range(LAST_TOKEN, len(token_ids) - 1)))

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, num: int) -> Drafts:
        """The first so many of them, which are a tree too."""
        return self if num == len(self) else Drafts(self.token_ids[:num], self.parents[:num])
