"""StopTexts: finds where a stop text ends a text, and the part that may be printed before that is known."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class StopTexts:
    """Looks for texts that end a text, which comes in pieces.

    The text ends where the first of them ends; of several that end there the longest counts.

    stops:   of at least one character each
    include: whether the text that ends it is part of it
    has_stopped: whether one was found; then nothing more of the text comes
    """

    stops: Sequence[str]
    include: bool
    has_stopped: bool = False
    _held: str = ""  # the longest end of the text that begins one of the stops, and is not all of it
    _longest: int = field(init=False)

    def __post_init__(self) -> None:
        self._longest = max(map(len, self.stops), default=0)

    def push(self, piece: str, *, counts: bool = True) -> str:
        """The text that can be printed now that the text goes on with a piece.

        counts: whether the text may end in this piece
        """
        if self.has_stopped:
            return ""
        if not self.stops:
            return piece
        text, known = self._held + piece, len(self._held)
        if counts and piece:
            # Each ends in the piece: an earlier end was found before, or did not count.
            found = [(at + len(stop), -len(stop)) for stop in self.stops if (at := _first(text, stop, known)) >= 0]
            if found:
                end, length = min(found)
                self.has_stopped, self._held = True, ""
                return text[:end] if self.include else text[: end + length]
        begins = self._where_one_begins(text)
        self._held = text[begins:]
        return text[:begins]

    def finish(self) -> str:
        """The text that was held back; no more text comes."""
        held, self._held = self._held, ""
        return held

    def _where_one_begins(self, text: str) -> int:
        for begin in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[begin:]
            if any(stop.startswith(end) and stop != end for stop in self.stops):
                return begin
        return len(text)


def _first(text: str, stop: str, known: int) -> int:
    """The place of the first end of `stop` after `known` characters, given as its beginning; -1: nowhere."""
    return text.find(stop, max(0, known - len(stop) + 1))
