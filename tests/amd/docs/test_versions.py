"""The page of the installation has the versions that the code, the scripts and the packages have."""

import re
import sys

import pytest

from rocm_attn.integrations.plugins import PLUGINS, Plugin
from rocm_attn.machine.aiter_releases import written_for
from rocm_attn.machine.target import IMAGE_RELEASES, KNOWN_TARGETS
from rocm_attn.providers import triton_cdna
from rocm_attn.providers.triton_hopper import TRITONS
from tests.amd.docs.pages import DOCS, pages
from tests.amd.house.source_tree import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = (DOCS / "install.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def row(first: str) -> list[str]:
    """Returns the cells of the table line that begins with `first`."""
    (found,) = re.finditer(rf"^\| {re.escape(first)} \| (.+) \|$", PAGE, re.MULTILINE)
    return found[1].split(" | ")


@pytest.mark.parametrize(("name", "package"), [("torch", "torch"), ("NumPy", "numpy"), ("Triton", "triton")])
def test_a_package_is_asked_for_as_in_pyproject(name: str, package: str) -> None:
    requested = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    assert [package + row(name)[0]] == [each for each in requested if re.match(rf"{package}\b", each)]


def test_python_rocm_and_the_oldest_triton_are_those_of_the_tree() -> None:
    assert row("Python")[0] == PROJECT["requires-python"]
    assert row("ROCm")[0] == f"{IMAGE_RELEASES.rocm} in the image"
    (oldest,) = re.findall(r"OLDEST_TRITON=(\S+)", (ROOT / "scripts" / "test.sh").read_text())
    assert f"{oldest} compiles every kernel" in row("Triton")[1]


def test_aiters_releases_are_those_that_its_refusal_names() -> None:
    assert row("AITER")[0].startswith(f"{written_for().removeprefix('AITER ')}; ")


def test_no_page_has_another_range_of_aiters_releases_and_all_have_the_release_that_explain_names() -> None:
    said, found = written_for().removeprefix("AITER "), set()
    for page in pages():
        text = " ".join(page.read_text().split())
        for place in re.finditer(r"v0\.\d+\.\d+\S* to v0\.\d+\.\d+", text):
            assert text.startswith(said, place.start()), f"{page.name}: {text[place.start() :][:60]}"
            found.add(page.name)
    assert {"README.md", "install.md", "aiter_ledger.md"} <= found
    assert f"({IMAGE_RELEASES.aiter})" in said


def test_every_arch_that_is_known_has_a_row() -> None:
    archs = re.findall(r"^\| (gfx\w+|sm_\w+|cpu) \|", PAGE, re.MULTILINE)
    assert set(archs) == set(KNOWN_TARGETS) - {"interpreter"}
    assert f"kernels for Hopper with Triton {' and '.join(map(str, TRITONS))}" in row("sm_90")[1]
    for arch in triton_cdna.LIMITS.archs:
        parts = "extend and decode" if arch in triton_cdna.EXTEND_LIMITS.archs else "Triton's, and decode"
        assert f"{parts} for CDNA with Triton {' and '.join(map(str, triton_cdna.TRITONS))}" in row(arch)[1]


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.engine)
def test_an_engines_releases_are_those_that_its_plug_in_serves(plugin: Plugin) -> None:
    assert f"{plugin.engine} {plugin.served}" in PAGE.replace("\n", " ")
