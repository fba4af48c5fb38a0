"""Seq: one sequence of a step, as the runtime and as the oracle know it."""

from dataclasses import dataclass, field

from rocm_lab.soak.model import looked_up
from rocm_lab.soak.oracle import Bools, Tokens


@dataclass(slots=True)
class Seq:
    """One sequence of a step.

    begin:     the place of its first new token
    ids:       of the new tokens
    positions: of the new tokens; their places, unless the step has a mask
    shows:     bool [new tokens, end] of a step with a mask; is_tree: whether that is one of a tree of drafts
    """

    row: int
    begin: int
    ids: list[int]
    positions: list[int] = field(default_factory=list)
    shows: Bools | None = None
    is_tree: bool = False

    def __post_init__(self) -> None:
        if not self.positions:
            self.positions = list(range(self.begin, self.end))

    @property
    def end(self) -> int:
        """Tokens after the step."""
        return self.begin + len(self.ids)

    @property
    def stored(self) -> list[int]:
        """The entries that the new tokens look up."""
        return [looked_up(token_id, position) for token_id, position in zip(self.ids, self.positions, strict=True)]

    def tokens(self) -> Tokens:
        """For the oracle."""
        return Tokens(self.stored, self.end, self.positions, self.shows, self.is_tree)
