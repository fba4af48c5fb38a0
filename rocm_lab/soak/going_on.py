"""GoingOn: after which tokens a row with recurrent states must go on, kept from docs/states.md and from no code.

A row goes on at token 0, after any of the tokens of a step that had `kept` or fewer, after the last one of a longer
step, after the tokens before its last step, and where a copy was made. It may go on elsewhere too, and is right then.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class GoingOn:
    """The rows of a runtime.

    kept:      the most new tokens of a step that keeps them; 0: the runtime has no recurrent layers
    untracked: rows of which the host does not know where they go on, so that only the device refuses a step
    """

    kept: int
    untracked: set[int] = field(default_factory=set)
    _after: dict[int, set[int]] = field(default_factory=dict)

    def surely(self, row: int, tokens: int) -> bool:
        """True if a step must go on after these tokens of a row."""
        return self.kept == 0 or tokens == 0 or tokens in self._after.get(row, ())

    def only_device_knows(self, row: int, tokens: int) -> bool:
        """True if the device may refuse a step after these tokens that the host takes."""
        return row in self.untracked and not self.surely(row, tokens)

    def lose_track(self, rows: Iterable[int]) -> None:
        """The host no longer knows where rows go on."""
        if self.kept:
            self.untracked.update(rows)

    def begin(self, row: int, *tokens: int) -> None:
        """A row goes on after these tokens alone."""
        self.untracked.discard(row)
        self._after[row] = set(tokens)

    def fork(self, row: int, child: int, tokens: int) -> None:
        """A row has a copy of another one's state after these tokens."""
        is_sure, is_lost = self.surely(row, tokens), self.only_device_knows(row, tokens)
        self.begin(child, *[tokens] * is_sure)
        if is_lost:
            self.lose_track([child])

    def stepped(self, row: int, begin: int, end: int) -> None:
        """A step has brought new tokens to a row."""
        if begin == 0:
            self.untracked.discard(row)
        if end > begin:
            self._after[row] = {begin, *(range(begin, end + 1) if end - begin <= self.kept else (end,))}

    def broke_off(self, row: int, begin: int) -> None:
        """A step of a row that went on after these tokens has not come to its end: it can be repeated."""
        self._after[row] = {begin} & self._after.get(row, set())
