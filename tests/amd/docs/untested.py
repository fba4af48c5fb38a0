"""The commands that no test runs, as listed at the end of docs/untested.md.

python -m tests.amd.docs.untested writes them.
"""

from __future__ import annotations

from tests.amd.docs.commands import shell_blocks
from tests.amd.docs.pages import DOCS, Block

PAGE = DOCS / "untested.md"
_HEADING = "## Commands that no test runs\n"


def page() -> str:
    """Returns the text of docs/untested.md, with its last section made from the marks over shell blocks."""
    said, heading, _ = PAGE.read_text().partition(_HEADING)
    assert heading, f"{PAGE.name} has lost its heading {_HEADING!r}"
    return said + heading + _section()


def _section() -> str:
    found = shell_blocks()
    by_reason: dict[str, list[Block]] = {}
    for block in found:
        if block.reason:
            by_reason.setdefault(block.reason, []).append(block)
    lines = [
        "",
        "Every shell block of these pages is run by a test, at night where it takes long, or has a reason over it why",
        "not. Those with a reason have their commands parsed, and the files that they start exist.",
        f"Of {len(found)} blocks {sum(map(len, by_reason.values()))} are not run:",
        "",
        "| reason | blocks |",
        "|---|---|",
    ]
    for reason, blocks in sorted(by_reason.items()):
        pages: dict[str, int] = {}
        for block in blocks:
            pages[block.page] = pages.get(block.page, 0) + 1
        named = ", ".join(f"`{page}`" + f" ({number})" * (number > 1) for page, number in pages.items())
        lines.append(f"| {reason} | {named} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page())
