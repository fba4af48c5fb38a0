"""The tables of the server's flags, generated from its parser: python -m tests.amd.docs.serve_flags writes it."""

import argparse
import re
from collections.abc import Iterator

from rocm_attn.cli.parser import build_parser
from rocm_attn.cli.vllm_flags import FROM_VLLM, WITHOUT
from rocm_lab.page_parts import with_part, with_rows
from tests.amd.docs.pages import DOCS

PAGE = DOCS / "serve_flags.md"


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return dict(commands.choices)


def _rows(group: argparse._ArgumentGroup) -> Iterator[str]:
    for action in group._group_actions:
        if action.dest == "help":
            continue
        names = " ".join(f"`{name}`" for name in action.option_strings)
        choices = ", ".join(map(str, action.choices or ()))
        values = "" if action.nargs == 0 else str(action.metavar or choices or action.dest.upper()).replace("|", ", ")
        yield f"| {names} | {values} | {action.help} |\n"


def page() -> str:
    """Returns the text of docs/serve_flags.md. Raises KeyError if a flag that vLLM's leads to does not exist."""
    serve = _commands(build_parser())["serve"]
    parts = []
    for group in serve._action_groups:
        rows = list(_rows(group))
        if rows:
            title = str(group.title)
            head = f"## {title[0].upper()}{title[1:]}\n\n| flag | value | effect (default) |\n|---|---|---|\n"
            parts.append(head + "".join(rows))
    ours = serve._option_string_actions
    lines = []
    for theirs, flags in {"MODEL": ("--model",), **FROM_VLLM}.items():
        assert all(ours[flag] for flag in flags)
        lines.append(f"| `{theirs}` | {', '.join(f'`{flag}`' for flag in flags)} |\n")
    for theirs, reason in WITHOUT.items():
        linked = re.sub(r"\(docs/(\w+\.md)\)", r"([how](\1))", reason)
        lines.append(f"| `{theirs}` | {linked} |\n")
    return with_rows(with_part(PAGE.read_text(), "flags", "\n".join(parts)), "vllm", lines)


if __name__ == "__main__":
    PAGE.write_text(page())
