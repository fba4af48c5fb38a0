"""The pages that are made from the simulator say what it does; a line of a Triton version changes nothing else."""

import hashlib
import re
from pathlib import Path

import pytest

from rocm_lab.page_parts import part_of, rows_of
from rocm_lab.simulator import coverage
from rocm_lab.simulator.isa.instructions import BUILDERS
from tests.amd.house.source_tree import ROOT
from tests.amd.simulator.other_kernels import Pin, pins
from tests.amd.simulator.record import with_choice

INSTRUCTIONS = ROOT / "docs" / "simulator_instructions.md"


def instructions(text: str) -> tuple[set[str], set[str]]:
    """The instructions under the headings of executed ones and of others."""
    executed, found, others = text.partition("## Not executed")
    assert found
    listed = [set(re.findall(r"`([a-z]\w+)`", part)) for part in (executed.partition("## Executed")[2], others)]
    return listed[0], listed[1]


def test_the_page_of_instructions_says_which_are_executed() -> None:
    executed, others = instructions(INSTRUCTIONS.read_text())
    assert executed <= BUILDERS.keys()
    assert not others & BUILDERS.keys()
    assert len(executed) > 400
    assert {"v_mfma_f32_32x32x16_f16", "buffer_load_dwordx4", "ds_bpermute_b32"} <= executed


@pytest.mark.nightly
def test_the_page_of_instructions_is_current() -> None:
    """With another Triton its assembler may know other instructions; those of the simulator are the same."""
    assert instructions(INSTRUCTIONS.read_text())[0] == instructions(coverage.page())[0]


def test_the_readme_has_a_line_for_every_kernel_of_other_projects() -> None:
    table = part_of((ROOT / "rocm_lab" / "simulator" / "README.md").read_text(), "other kernels")
    for name, pin in pins().items():
        assert table.count(f"| `{name}` | {pin.repo} {pin.revision[:10]} |") == 2


def test_a_kernel_is_taken_from_the_place_that_has_its_very_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "there" / "a.py"
    file.parent.mkdir()
    file.write_text("@decorated\n@more(x=1)\ndef one(x):\n    return x + HERE\n\n\ndef two(): ...\n")

    def source(sha256: str) -> str:
        files = ({"path": "python/a.py", "sha256": sha256, "functions": ["one"]},)
        return Pin("a/b", "v1", "one", files, {"HERE": "3"}).source()

    monkeypatch.setenv("OTHER_KERNELS", f"{tmp_path}:{file.parent}")
    with pytest.raises(ValueError, match=r"no place in OTHER_KERNELS has python/a.py of v1; add a clone"):
        source("0" * 64)
    assert source(hashlib.sha256(file.read_bytes()).hexdigest()).endswith(
        "HERE = 3\n\n\n@triton.jit\ndef one(x):\n    return x + HERE\n"
    )


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
