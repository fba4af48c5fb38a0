"""The tables of docs/flashinfer.md about names, made from the lists that the module itself refuses and serves by.

    python -m tests.amd.integrations.flashinfer_page

writes them.
"""

from collections.abc import Iterable

from rocm_attn.integrations.flashinfer.names import TABLES
from rocm_lab.page_parts import with_rows
from tests.amd.house.source_tree import ROOT
from tests.amd.integrations.signatures import served_names

PAGE = ROOT / "docs" / "flashinfer.md"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def tables() -> dict[str, list[str]]:
    """Returns the rows of served names, of refused names, and of refused attributes."""
    return {
        "served": [f"| `{module}` | {_quoted(names)} |\n" for module, names in sorted(served_names().items())],
        "refused": [f"| {_quoted(names)} | {reason} |\n" for reason, names in TABLES["names"].items()],
        "attributes": [f"| {_quoted(names)} | {reason} |\n" for reason, names in TABLES["attributes"].items()],
    }


def page() -> str:
    text = PAGE.read_text(encoding="utf-8")
    for name, rows in tables().items():
        text = with_rows(text, name, rows)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
