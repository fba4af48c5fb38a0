"""The tables of environment variables, generated from the code: python -m tests.amd.docs.environment writes it."""

from rocm_attn.machine.aiter_switches import SWITCHES
from rocm_attn.machine.settings import VARIABLES
from rocm_lab.page_parts import with_rows
from tests.amd.docs.pages import DOCS

PAGE = DOCS / "environment.md"


def page() -> str:
    """Returns the text of docs/environment.md."""
    ours = [
        f"| `{each.name}` | {each.read_by} | {each.values} | {each.unset} | {each.effect} |\n" for each in VARIABLES
    ]
    aiters = [f"| `{each.name}` | {each.since} | {each.changes} | {each.verdict} |\n" for each in SWITCHES]
    return with_rows(with_rows(PAGE.read_text(), "ours", ours), "aiters", aiters)


if __name__ == "__main__":
    PAGE.write_text(page())
