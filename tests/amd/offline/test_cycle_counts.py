"""The page of counts is current. Every run counts kernels that other tests compile; the night counts all."""

from pathlib import Path

import pytest
import triton

from tests.amd.kernels.cdna_extend_cases import ARCHS as EXTEND_ARCHS
from tests.amd.offline.candidate_kernels import DECODE_LAYERS
from tests.amd.offline.cdna_kernels import Latents
from tests.amd.offline.compiling import AMD_ARCHS
from tests.amd.offline.cycle_counts import (
    DECODES,
    EXTENDS,
    LATENTS,
    SHOWN,
    DecodedLayer,
    ExtendedLayer,
    decode_line,
    extend_line,
    latent_line,
    lines_of,
    plain_extend_line,
    plain_lines_of,
)
from tests.amd.offline.matrix import ROWS, Row

PAGE = Path(__file__).parents[3] / "docs/cycles.md"
SHOWN_ROWS = [row for row in ROWS if str(row) in SHOWN]
# Those of the first runs of test_cdna_compiles.py: each is compiled once.
EXTENDS_BY_DAY = ((EXTENDS[2], "gfx942"), (EXTENDS[1], "gfx950"))
DECODES_BY_DAY = (DECODES[0], DECODES[-2])


def test_the_page_says_which_triton_compiled_and_has_every_row() -> None:
    page = PAGE.read_text()
    assert "Triton 3.9.0" in page
    assert len(SHOWN_ROWS) == len(SHOWN)


NEEDS_ITS_TRITON = pytest.mark.skipif(not triton.__version__.startswith("3.9."), reason="the page is of Triton 3.9")


@NEEDS_ITS_TRITON
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=str(row), marks=() if row == DECODE_LAYERS[1] else pytest.mark.nightly)
        for row in DECODE_LAYERS
    ],
)
def test_the_counts_of_decode_are_current(row: Row) -> None:
    page = PAGE.read_text()
    missing = [line for line in plain_lines_of(row) if line not in page]
    assert not missing, "python -m tests.amd.offline.cycle_counts docs"


@NEEDS_ITS_TRITON
@pytest.mark.parametrize(
    ("layer", "arch"),
    [
        pytest.param(layer, arch, marks=[pytest.mark.nightly] * ((layer, arch) not in EXTENDS_BY_DAY))
        for layer in EXTENDS
        for arch in EXTEND_ARCHS
    ],
)
def test_the_counts_of_extend_in_gluon_and_of_plain_extend_are_current(layer: ExtendedLayer, arch: str) -> None:
    page = PAGE.read_text()
    assert extend_line(arch, layer) + plain_extend_line(arch, layer) in page, (
        "python -m tests.amd.offline.cycle_counts docs"
    )


@NEEDS_ITS_TRITON
@pytest.mark.parametrize("arch", AMD_ARCHS)
@pytest.mark.parametrize(
    "layer", [pytest.param(each, marks=[pytest.mark.nightly] * (each not in DECODES_BY_DAY)) for each in DECODES]
)
def test_the_work_of_decode_for_a_byte_is_current(layer: DecodedLayer, arch: str) -> None:
    assert decode_line(arch, layer) in PAGE.read_text(), "python -m tests.amd.offline.cycle_counts docs"


@NEEDS_ITS_TRITON
@pytest.mark.parametrize("arch", EXTEND_ARCHS)
@pytest.mark.parametrize(
    "layer", [LATENTS[2], *(pytest.param(each, marks=pytest.mark.nightly) for each in LATENTS if each != LATENTS[2])]
)
def test_the_work_of_latent_decode_for_a_byte_is_current(layer: Latents, arch: str) -> None:
    assert latent_line(arch, layer) in PAGE.read_text(), "python -m tests.amd.offline.cycle_counts docs"


@NEEDS_ITS_TRITON
@pytest.mark.nightly
@pytest.mark.parametrize("row", SHOWN_ROWS, ids=str)
def test_the_counts_of_other_kernels_are_current(row: Row) -> None:
    page = PAGE.read_text()
    missing = [line for line in lines_of(row) if line not in page]
    assert not missing, "python -m tests.amd.offline.cycle_counts docs"
