"""CallReader: extracts function calls from a text that comes in pieces."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from rocm_serve.server.call_forms import CallForm
from rocm_serve.server.finite_json import FINITE_JSON


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model asks for. arguments: as JSON"""

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class Reader(Protocol):
    """Reads the text of one choice."""

    def push(self, text: str) -> list[str | ToolCall]:
        """Takes the next text, and returns the parts that are decided now and were not returned yet."""

    def finish(self) -> list[str | ToolCall]:
        """Returns the rest. The text has ended."""


class TextReader:
    """The reader of a choice that has no calls."""

    def push(self, text: str) -> list[str | ToolCall]:
        return [text] if text else []

    def finish(self) -> list[str | ToolCall]:
        return []


class _At(Enum):
    """The part that comes next: text, a call's object, the rest of it, or its closing mark."""

    TEXT, OBJECT, REST, CLOSE = auto(), auto(), auto(), auto()


class CallReader:
    """The reader of a choice that may have calls.

    Anything but a complete call of a known function stays text, so nothing that a model writes is lost. Text that may
    become a call is held back until that is decided. Blanks around calls are dropped.

    form:  of the model
    names: of the functions
    """

    def __init__(self, form: CallForm, names: Collection[str]) -> None:
        self._opens, self._closes, self._arguments = form.opens.strip(), form.closes.strip(), form.arguments
        self._mark, self._names = form.mark, frozenset(names)
        self._at = _At.TEXT if self._opens else _At.OBJECT
        self._held = ""  # text that was not returned yet
        self._before = ""  # text before the object, which is returned if the object is no call
        self._object = _JsonObject()
        self._has_called = False

    def push(self, text: str) -> list[str | ToolCall]:
        """Does the same as Reader.push."""
        self._held += text
        found: list[str | ToolCall] = []
        steps = {_At.TEXT: self._text, _At.OBJECT: self._begin, _At.REST: self._rest, _At.CLOSE: self._close}
        while steps[self._at](found):
            pass
        return found

    def finish(self) -> list[str | ToolCall]:
        """Does the same as Reader.finish."""
        left = self._before + self._held if self._at in (_At.OBJECT, _At.REST) else self._held
        if self._at is _At.CLOSE and self._closes.startswith(left.strip()):
            left = ""
        self._held = self._before = ""
        return [left] if left and not (self._has_called and left.isspace()) else []

    def _tell(self, found: list[str | ToolCall], text: str) -> None:
        if text:
            found.append(text)

    def _text(self, found: list[str | ToolCall]) -> bool:
        """Takes what it can of the held text, like the other steps. Returns whether the next step may run."""
        if not self._opens:
            self._tell(found, self._held)
            self._held = ""
            return False
        before, opens, after = self._held.partition(self._opens)
        if opens:
            self._tell(found, before.rstrip())
            self._held, self._before, self._at = after, before[len(before.rstrip()) :] + opens, _At.OBJECT
            return True
        begun = max(n for n in range(len(self._opens)) if self._held.endswith(self._opens[:n]))
        known = len(self._held[: len(self._held) - begun].rstrip())
        self._tell(found, self._held[:known])
        self._held = self._held[known:]
        return False

    def _begin(self, found: list[str | ToolCall]) -> bool:
        stripped = self._held.lstrip()
        unmarked = stripped.removeprefix(self._mark).lstrip()
        if not unmarked or self._mark.startswith(stripped):  # the mark may be incomplete
            return False
        stripped = unmarked
        self._before += self._held[: len(self._held) - len(stripped)]
        self._held = stripped
        if stripped.startswith("{"):
            self._object, self._at = _JsonObject(), _At.REST
        else:
            self._tell(found, self._before)
            self._before, self._at = "", _At.TEXT
        return True

    def _rest(self, found: list[str | ToolCall]) -> bool:
        end = self._object.end_in(self._held)
        if end < 0:
            return False
        call = self._call(self._held[:end])
        if call is not None:
            found.append(call)
            self._has_called = True
        else:
            self._tell(found, self._before + self._held[:end])
        self._held, self._before, self._at = self._held[end:], "", _At.CLOSE if call is not None else _At.TEXT
        return True

    def _close(self, found: list[str | ToolCall]) -> bool:
        stripped = self._held.lstrip()
        if stripped.startswith(self._closes) and (self._closes or stripped):
            self._held = stripped[len(self._closes) :]
        elif self._closes.startswith(stripped):
            return False
        self._at = _At.TEXT
        return True

    def _call(self, text: str) -> ToolCall | None:
        try:
            members = _members(text)
        except (ValueError, RecursionError):
            return None
        name, _ = members.get("name", (None, ""))
        arguments, written = members.get(self._arguments, ({}, "{}"))
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        return ToolCall(name, written)


_BLANKS = re.compile(r"[ \t\n\r]*")


def _members(text: str) -> dict[str, tuple[object, str]]:
    """Returns each value of a JSON object with its text. Raises ValueError, RecursionError."""
    FINITE_JSON.decode(text)  # the text is valid JSON from here on
    members: dict[str, tuple[object, str]] = {}
    place = _after_blanks(text, 1)
    while text[place] != "}":
        if text[place] == ",":
            place = _after_blanks(text, place + 1)
        key, place = FINITE_JSON.raw_decode(text, place)
        begin = _after_blanks(text, _after_blanks(text, place) + 1)
        value, end = FINITE_JSON.raw_decode(text, begin)
        members[key] = value, text[begin:end]
        place = _after_blanks(text, end)
    return members


def _after_blanks(text: str, place: int) -> int:
    found = _BLANKS.match(text, place)
    return found.end() if found else place


class _JsonObject:
    """Finds the end of a JSON object in a growing text. It looks at each character once."""

    def __init__(self) -> None:
        self._seen = self._depth = 0
        self._in_text = self._is_escaped = False

    def end_in(self, text: str) -> int:
        """Returns the place after the object's last character, or -1 if it is incomplete. text: extends the last one"""
        for place in range(self._seen, len(text)):
            character = text[place]
            if self._in_text:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_text = False
            elif character == '"':
                self._in_text = True
            elif character == "{":
                self._depth += 1
            elif character == "}":
                self._depth -= 1
                if not self._depth:
                    return place + 1
        self._seen = len(text)
        return -1
