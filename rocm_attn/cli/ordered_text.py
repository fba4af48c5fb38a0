"""OrderedText: texts that grow at the same time, printed one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO


class OrderedText:
    """Prints texts in order: the first that is not done is live; pieces of later ones are held until their turn.

    headers: one per text, printed before it, or none at all
    """

    def __init__(self, out: TextIO, headers: Sequence[str], num_texts: int) -> None:
        assert len(headers) in (0, num_texts)
        self._out = out
        self._headers = headers
        self._held = [""] * num_texts
        self._done = [False] * num_texts
        self._live = -1
        self._turn_to(0)

    def add(self, text: int, piece: str) -> None:
        """Adds a piece to the text with this number."""
        if text == self._live:
            self._write(piece)
        else:
            self._held[text] += piece

    def finish(self, text: int) -> None:
        """Marks the text with this number as complete."""
        self._done[text] = True
        while self._live < len(self._done) and self._done[self._live]:
            self._write("\n")
            self._turn_to(self._live + 1)

    def _turn_to(self, text: int) -> None:
        self._live = text
        if text == len(self._held):
            return
        if self._headers:
            self._write(("\n" if text else "") + self._headers[text] + "\n")
        self._write(self._held[text])

    def _write(self, piece: str) -> None:
        self._out.write(piece)
        self._out.flush()
