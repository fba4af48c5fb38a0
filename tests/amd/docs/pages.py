"""The pages of this repository: their code blocks, links, and the order in which docs/README.md lists them."""

import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.amd.house.source_tree import ROOT

DOCS = ROOT / "docs"
LIST = DOCS / "README.md"

_FENCE = re.compile(r"^( *)(`{3,})(\w*).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_MARK = re.compile(
    r"<!-- (not run: (?P<reason>.+)|(?P<night>run at night)|(?P<server>run against a server)"
    r"|(?P<serves>run until it serves)) -->\n\s*\Z"
)


@dataclass(frozen=True, slots=True)
class Block:
    """A code block of a page.

    page:     its path from the root of the repository
    line:     of its fence
    language: the fence's language; "" if it has none
    reason:   why no test runs it; "" if one does
    at_night: true if the test that runs it is left to .ci/nightly
    server:   true if it sends requests to a server, see served.py
    serves:   true if it is a server, which ends on a signal
    """

    page: str
    line: int
    language: str
    text: str
    reason: str = ""
    at_night: bool = False
    server: bool = False
    serves: bool = False

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Returns every page: those of docs/, and those next to their subjects."""
    beside = [*sorted((ROOT / "docker").glob("**/README.md")), *sorted((ROOT / "rocm_lab/benchmarks").glob("*.md"))]
    beside.append(ROOT / "rocm_lab/simulator/README.md")
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), *beside]


def blocks(page: Path) -> list[Block]:
    text, found = page.read_text(), []
    for fence in _FENCE.finditer(text):
        mark = _MARK.search(text, 0, fence.start())
        found.append(
            Block(
                page.relative_to(ROOT).as_posix(),
                text.count("\n", 0, fence.start()) + 1,
                fence[3],
                "\n".join(line.removeprefix(fence[1]) for line in fence[0].splitlines()[1:-1]),
                (mark["reason"] or "") if mark else "",
                bool(mark and mark["night"]),
                bool(mark and mark["server"]),
                bool(mark and mark["serves"]),
            )
        )
    return found


def with_links(text: str, change: Callable[[str], str]) -> str:
    """Returns a page with its links replaced by `change`. Links to other sites or within the page, and code, stay."""

    def changed(link: re.Match[str]) -> str:
        if re.match(r"[a-z]+:|#", link[2]):
            return link[0]
        return link[1] + change(link[2]) + link[3]

    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(changed, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(changed, text[end:])])


def targets(page: Path) -> list[str]:
    """Returns the files that a page links to, as paths from the root of the repository, without anchors."""
    found: list[str] = []

    def note(link: str) -> str:
        found.append(resolved(page.relative_to(ROOT).as_posix(), link.partition("#")[0]))
        return link

    with_links(page.read_text(), note)
    return found


def resolved(page: str, link: str) -> str:
    """Returns the target of a page's link; both are paths from the root of the repository. Raises ValueError."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) if link else page
    if target.startswith("..") or not (ROOT / target).is_file():
        raise ValueError(f"{page} links to {link}, which is no file of this repository")
    return target


def menu() -> dict[str, list[tuple[str, str]]]:
    """Returns the sections of docs/README.md; in each, title and path of its pages, from the repository's root."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in LIST.read_text().splitlines():
        if line.startswith("## "):
            found[line[3:]] = []
        row = re.match(r"\| \[([^]]+)\]\(([^)]+)\) \|", line)
        if row:
            title = row[1][0].upper() + row[1][1:]
            found[list(found)[-1]].append((title, resolved("docs/README.md", row[2])))
    return found
