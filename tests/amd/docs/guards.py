"""The list of safeguards on their page, generated from the registry: python -m tests.amd.docs.guards writes it."""

from __future__ import annotations

from rocm_attn.guards.registry import GUARDS
from tests.amd.docs.pages import DOCS

PAGE = DOCS / "guards.md"

_BEGIN, _END = "<!-- guard list: begin -->\n", "<!-- guard list: end -->\n"
_HEAD = "| id | what goes wrong without it | report |\n|---|---|---|\n"


def page() -> str:
    """Returns the text of docs/guards.md with the list as the registry has it."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    rows = "".join(f"| `{guard.id}` | {guard.prevents} | {guard.report} |\n" for guard in GUARDS)
    return before + _BEGIN + _HEAD + rows + _END + rest.partition(_END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
