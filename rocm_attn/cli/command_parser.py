"""CommandParser: an argparse parser that refuses with one sentence, and suggests the word that was meant.

argparse's own suggestions exist from Python 3.14 on; it lists the usage before each refusal, 28 lines for `serve`.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from rocm_attn.cli.vllm_flags import FROM_VLLM, WITHOUT


class CommandParser(argparse.ArgumentParser):
    """The parser of `rocm-attn`, and of each command. A command refuses its own words: they never reach its parent.

    Flags have no abbreviations: --api-key KEY of vLLM would mean our --api-key-file, whose refusal names the file.
    """

    def __init__(self, **named: Any) -> None:
        super().__init__(**named, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parses arguments, and refuses those that are left over: the list returned is empty."""
        self._refuse_unknown_flags(sys.argv[1:] if args is None else args)
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            self._refuse(rest)
        return parsed, rest

    def _refuse_unknown_flags(self, args: Sequence[str]) -> None:
        """Refuses a misspelt flag. argparse would first name the flag that is missing because of it."""
        if self._subparsers is not None or "-" not in self.prefix_chars:
            return  # the words are those of a command
        for word in args:
            if word == "--":
                return
            name = word.partition("=")[0]
            if word.startswith("--") and " " not in word and name not in self._option_string_actions:
                self._refuse([name])

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        name = unknown[0].partition("=")[0]
        own = [flag for flag in self._option_string_actions if flag.startswith("--")]
        if name in FROM_VLLM:
            ours = [flag for flag in FROM_VLLM[name] if flag in own]
            hint = f"; vLLM's {name} is {' and '.join(ours)} here" if ours else ""
        elif name in WITHOUT:
            hint = f"; {WITHOUT[name]}"
        elif not name.startswith("-") and "--model" in own:  # as of `vllm serve MODEL`
            hint = f"; if that is the model, give it as --model {name}"
        else:
            hint = meant(name, own)
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")

    def error(self, message: str) -> NoReturn:
        """Prints the sentence and where the arguments are listed, and exits with code 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # In --stop=-- the dashes are the value. Up to Python 3.12 argparse takes them for the end of flags: [] is left.
        if arg_strings == ["--"] and action.option_strings:
            value = self._get_value(action, "--")
            self._check_value(action, value)
            return value
        value = super()._get_values(action, arg_strings)
        # --out "$FILE" without FILE gives it: the command would go on as if the option were not there.
        if value == "" and action.option_strings and action.type is None and action.default is None:
            raise argparse.ArgumentError(action, "it is empty; give a value, or leave the option out")
        return value

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices: Sequence[Any] = () if action.choices is None else tuple(action.choices)
        if choices and value not in choices:
            hint = meant(str(value), map(str, choices)) or f" (choose from {', '.join(map(str, choices))})"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}")


def meant(word: str, words: Iterable[str]) -> str:
    """Returns a question after the word of `words` that is spelt most like `word`, or "" if none is."""
    close = get_close_matches(word, list(words), n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else ""
