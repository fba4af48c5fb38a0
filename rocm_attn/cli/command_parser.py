"""CommandParser: an argparse parser that refuses with one sentence, and suggests the word that was meant.

argparse's own suggestions exist from Python 3.14 on; it lists the usage before each refusal, 28 lines for `serve`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """The parser of `rocm-attn`, and of each command. A command refuses its own words: they never reach its parent."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parses arguments, and refuses those that are left over: the list returned is empty."""
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            unknown = rest[0].partition("=")[0]
            self.error(f"unrecognized arguments: {' '.join(rest)}{meant(unknown, flags)}")
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        """Prints the sentence and where the arguments are listed, and exits with code 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices: Sequence[Any] = () if action.choices is None else tuple(action.choices)
        if choices and value not in choices:
            hint = meant(str(value), map(str, choices)) or f" (choose from {', '.join(map(str, choices))})"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}")


def meant(word: str, words: Iterable[str]) -> str:
    """Returns a question after the word of `words` that is spelt most like `word`, or "" if none is."""
    close = get_close_matches(word, list(words), n=1)
    return f"; did you mean {close[0]}?" if close else ""
