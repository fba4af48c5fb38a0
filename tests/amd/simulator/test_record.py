"""The document's table has one line for each Triton version, and nothing around it changes."""

import pytest

from rocm_lab.page_parts import rows_of
from tests.amd.house.source_tree import ROOT
from tests.amd.simulator.record import with_choice

DOCUMENT = "# Title\n\n<!-- grid -->\n| Triton |\n|---|\n<!-- end of grid -->\n\nAfter.\n"


def test_a_line_is_added_and_the_rest_stays() -> None:
    text = with_choice(DOCUMENT, ["3.9.0", "first"])
    assert text == DOCUMENT.replace("|---|\n", "|---|\n| 3.9.0 | first |\n")


def test_a_version_is_written_anew_and_versions_are_in_order() -> None:
    text = DOCUMENT
    for cells in (["3.10.0", "a"], ["3.9.0", "old"], ["3.6.0", "b"], ["3.9.0", "new"]):
        text = with_choice(text, cells)
    assert rows_of(text, "grid") == ["| 3.6.0 | b |\n", "| 3.9.0 | new |\n", "| 3.10.0 | a |\n"]


def test_a_document_without_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no part between"):
        with_choice("# Title\n", ["3.9.0"])


def test_the_document_has_the_table() -> None:
    document = (ROOT / "rocm_lab" / "simulator" / "README.md").read_text()
    assert with_choice(document, ["9.9.9"]).count("| 9.9.9 |") == 1
