"""The document's table has one line for each Triton version, and nothing around it changes."""

from __future__ import annotations

import pytest

from tests.amd.house.source_tree import ROOT
from tests.amd.simulator.record import BEGIN, END, with_choice

DOCUMENT = f"# Title\n\n{BEGIN}| Triton |\n|---|\n{END}\nAfter.\n"


def lines(text: str) -> list[str]:
    """The lines of the table, without its head."""
    return text.partition(BEGIN)[2].partition(END)[0].splitlines()[2:]


def test_a_line_is_added_and_the_rest_stays() -> None:
    text = with_choice(DOCUMENT, ["3.9.0", "first"])
    assert lines(text) == ["| 3.9.0 | first |"]
    assert text.startswith("# Title\n\n")
    assert text.endswith("\nAfter.\n")


def test_a_version_is_written_anew_and_versions_are_in_order() -> None:
    text = DOCUMENT
    for cells in (["3.10.0", "a"], ["3.9.0", "old"], ["3.6.0", "b"], ["3.9.0", "new"]):
        text = with_choice(text, cells)
    assert lines(text) == ["| 3.6.0 | b |", "| 3.9.0 | new |", "| 3.10.0 | a |"]


def test_a_document_without_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no table between"):
        with_choice("# Title\n", ["3.9.0"])


def test_the_document_has_the_table() -> None:
    document = (ROOT / "rocm_lab" / "simulator" / "README.md").read_text()
    assert with_choice(document, ["9.9.9"]).count("| 9.9.9 |") == 1
