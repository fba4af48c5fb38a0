"""The site builds without a warning, has every page and every stable name, and fetches nothing from elsewhere."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from rocm_attn.models.families import FAMILIES
from tests.amd.docs import capabilities, capacity, environment, known_bad, model_list, reference, serve_flags
from tests.amd.docs.pages import menu, resolved, with_links
from tests.amd.house import interface
from tests.amd.house.source_tree import ROOT

CONFIG = ROOT / "docs" / "site" / "mkdocs.yml"
# Each worker with one of these tests builds the site, in ten seconds. Every run has one.
ON_THE_SITE = pytest.mark.nightly


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the site, built as `mkdocs build --strict` does, which allows no warning."""
    folder = tmp_path_factory.mktemp("site")
    seen: list[str] = []

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    handler = Seen(logging.WARNING)
    logging.getLogger("mkdocs").addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NO_MKDOCS_2_WARNING", "1")  # about the theme's own future, printed, no warning of this site
            build(load_config(str(CONFIG), strict=True, site_dir=str(folder)))
    finally:
        logging.getLogger("mkdocs").removeHandler(handler)
    assert seen == []
    return folder


def html(site: Path, place: str) -> str:
    """Returns a page of the site, by the Markdown file's path in it."""
    path = Path(place)
    name = "index" if path.name == "README.md" else path.stem
    return (site / path.parent / ("" if name == "index" else name) / "index.html").read_text()


@ON_THE_SITE
def test_every_page_of_the_list_is_on_the_site(site: Path) -> None:
    for path in (path for pages in menu().values() for _, path in pages):
        place = path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"
        assert "<h1" in html(site, place), path
    for place, (_, text) in reference.pages().items():
        shown = re.findall(r'<h[23] id="[^"]+">([\w.]+)', html(site, f"reference/{place}.md"))
        assert shown == re.findall(r"^###? ([\w.]+)$", text, re.MULTILINE)


def test_every_stable_name_and_every_public_method_is_in_the_reference() -> None:
    found: set[str] = set()
    for _, text in reference.pages().values():
        found |= set(re.findall(r"^###? ([\w.]+)$", text, re.MULTILINE))
    assert {name for names in interface.groups().values() for name in names} <= found
    assert {"AttentionRuntime.step", "Engine.submit", "StepRunner.run", "RequestTable.fork"} <= found
    assert len(found) > 2 * len(interface.groups())


def test_docstrings_are_shown_as_they_were_meant() -> None:
    text = "Sums *all* `a_b`.\n\nrows, q: [T] of them;\n      and more\nRaises BadBatch: when not.\n\n    2 < 3"
    assert reference.markdown(text).split("\n") == [
        "Sums \\*all\\* `a_b`.",
        "",
        "| | |",
        "|---|---|",
        "| `rows, q` | \\[T\\] of them; and more |",
        "",
        "Raises BadBatch: when not.",
        "",
        "```text",
        "2 < 3",
        "```",
    ]


@ON_THE_SITE
def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)[^>]+src="(https?:[^"]*)"', page.read_text())
        loaded += re.findall(
            r'<link[^>]+rel="(?:stylesheet|preconnect|icon)"[^>]+href="(https?:[^"]*)"', page.read_text()
        )
        assert loaded == [], page


@ON_THE_SITE
def test_links_out_of_docs_lead_to_copies(site: Path) -> None:
    assert 'href="../repository/CHANGELOG/"' in html(site, "stability.md")
    assert 'href="../../engines/"' in html(site, "repository/CHANGELOG.md")


def test_links_are_changed_where_they_are_links() -> None:
    text = "[a](x.md#y) ![p](p.svg) [b](https://c.d) [e](#f)\n```text\n[g](h.md)\n```\n"
    assert with_links(text, str.upper) == "[a](X.MD#Y) ![p](P.SVG) [b](https://c.d) [e](#f)\n```text\n[g](h.md)\n```\n"
    assert resolved("docs/steps.md", "../README.md") == "README.md"
    with pytest.raises(ValueError, match=r"docs/steps.md links to missing.md"):
        resolved("docs/steps.md", "missing.md")


@pytest.mark.parametrize(
    "writer",
    [capabilities, environment, known_bad, model_list, serve_flags, pytest.param(capacity, marks=pytest.mark.nightly)],
    ids=lambda writer: writer.__name__,
)
def test_a_page_that_is_made_from_code_is_current(writer: Any) -> None:
    assert writer.PAGE.read_text() == writer.page(), f"run python -m {writer.__name__}"


def test_every_family_has_a_name_that_users_know() -> None:
    listed = [name for model in model_list.MODELS for name in model.architectures]
    assert sorted(listed) == sorted(FAMILIES)


def test_the_page_of_capacity_has_the_figures_of_capture_plan() -> None:
    page = capacity.PAGE.read_text()
    for row in (capacity.row("Llama-3.1-8B", 1), capacity.times_row("Llama-3.1-8B", 1, "mi300x")):
        assert row in page, "run python -m tests.amd.docs.capacity"
