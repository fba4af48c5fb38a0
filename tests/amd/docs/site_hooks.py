"""Hooks that MkDocs calls: the menu, pages and files from outside docs/, and the reference of every name.

docs/ stays readable in the repository: links lead to files there. On the site, a linked page outside docs/ becomes a
page, and any other such file a copy; both keep their paths, under repository/.
"""

import posixpath
from collections.abc import Iterable
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tests.amd.docs import reference
from tests.amd.docs.pages import menu, resolved, targets, with_links
from tests.amd.house.source_tree import ROOT

_REFERENCE = "API reference"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Builds the menu from docs/README.md's sections."""
    sections: list[Any] = [{"Home": "README.md"}]
    for section, listed in menu().items():
        entries = [{title: _place(path)} for title, path in listed]
        if section == _REFERENCE:
            entries += [{title: f"reference/{name}.md"} for name, (title, _) in reference.pages().items()]
        # A section of one page is that page.
        sections.append({section: next(iter(entries[0].values())) if len(entries) == 1 else entries})
    config.nav = sections
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files outside docs/ that pages link to, and the reference."""
    for path in sorted(_outside(file.src_uri for file in files.documentation_pages())):
        content = (ROOT / path).read_bytes()
        files.append(File.generated(config, _place(path), content=content))
    for name, (_, text) in reference.pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Changes links to the places of their files on the site."""
    here = page.file.src_uri
    if here.startswith("reference/"):
        return markdown

    def on_the_site(link: str) -> str:
        path, hash_sign, anchor = link.partition("#")
        return posixpath.relpath(_place(resolved(_origin(here), path)), posixpath.dirname(here)) + hash_sign + anchor

    return with_links(markdown, on_the_site)


def _outside(pages: Iterable[str]) -> set[str]:
    """Returns the files outside docs/ that these pages of docs/ link to, also through other files."""
    found: set[str] = set()
    ahead = [f"docs/{page}" for page in pages]
    while ahead:
        page = ahead.pop()
        for target in targets(ROOT / page):
            if not target.startswith("docs/") and target not in found:
                found.add(target)
                ahead += [target] * target.endswith(".md")
    return found


def _place(path: str) -> str:
    """Returns the site path of a file of the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def _origin(place: str) -> str:
    """Returns the repository path of a file of the site."""
    return place.removeprefix("repository/") if place.startswith("repository/") else f"docs/{place}"
