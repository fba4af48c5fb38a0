"""The list of safeguards on their page, generated from the registry: python -m tests.amd.docs.guards writes it."""

from rocm_attn.guards.registry import GUARDS
from rocm_lab.page_parts import with_rows
from tests.amd.docs.pages import DOCS

PAGE = DOCS / "guards.md"


def page() -> str:
    """Returns the text of docs/guards.md with the list as the registry has it."""
    rows = [f"| `{guard.id}` | {guard.prevents} | {guard.report} |\n" for guard in GUARDS]
    return with_rows(PAGE.read_text(), "safeguards", rows)


if __name__ == "__main__":
    PAGE.write_text(page())
