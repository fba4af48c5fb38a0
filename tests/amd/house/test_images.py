"""The images: pinned, scoped, not root, and what they are built of exists. Building them takes a Docker daemon."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.amd.house.source_tree import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
# A stage: its name, what it is made from, and its text.
STAGES = {
    name: (base, text)
    for base, name, text in re.findall(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S)
}


def test_base_images_are_pinned_by_digest() -> None:
    images = re.findall(r"^ARG \w*BASE_IMAGE=(\S+)$", DOCKERFILE, re.M)
    assert len(images) == 2
    assert all(re.fullmatch(r"[\w/.:-]+:[\w.-]+@sha256:[0-9a-f]{64}", image) for image in images)


def test_every_base_is_an_argument_or_a_stage_before() -> None:
    seen: set[str] = set()
    for name, (base, _) in STAGES.items():
        assert base in {"${BASE_IMAGE}", "${CUDA_BASE_IMAGE}", "base-${PLATFORM}", *seen}
        seen.add(name)
    assert list(STAGES)[-1] == "serve", "the last stage is what is built by default"


def test_an_argument_is_declared_in_the_stage_that_uses_it() -> None:
    """Builders differ in whether a stage inherits it: a build that passes on one would not on the other."""
    known = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.M))
    for name, (_, text) in STAGES.items():
        used = {word for word in re.findall(r"\$\{(\w+)\}", text) if word in known}
        declared = set(re.findall(r"^ARG (\w+)", text, re.M))
        assert used <= declared, f"stage {name} uses {used - declared}"


def test_what_old_builders_do_not_know_is_not_used() -> None:
    assert "<<" not in DOCKERFILE
    assert "# syntax=" not in DOCKERFILE


def test_the_image_that_serves_is_not_root_and_has_its_tests_behind_it() -> None:
    base, serve = STAGES["serve"]
    assert base == "runtime"
    assert "COPY --from=ci " in serve
    assert "HEALTHCHECK" in serve
    (user,) = re.findall(r"^USER (\S+)$", STAGES["runtime"][1], re.M)
    assert user == "${SERVE_UID}"
    assert re.findall(r"^USER (\S+)$", serve, re.M) == []


def test_everything_that_is_copied_by_name_exists() -> None:
    sources = re.findall(r"^COPY (?!--from)(?:--\S+ )*(\S+) ", DOCKERFILE, re.M)
    assert sources
    assert all((ROOT / source).exists() for source in sources)


def test_the_images_install_what_tests_need_and_nothing_that_the_base_brings() -> None:
    pins = runpy.run_path(str(ROOT / "docker" / "pins.py"))
    with open(ROOT / "pyproject.toml", "rb") as file:
        lines = list(pins["requirements"]("dev", tomllib.load(file)["project"]))
    assert any(line.startswith("pytest") for line in lines)
    assert not [line for line in lines if line.startswith(("torch", "triton", "rocm-attn"))]
    kept = list(pins["constraints"]())
    assert f"torch=={torch.__version__}" in kept
    assert all(re.fullmatch(r"[\w-]+==\S+", line) for line in kept)


def test_the_cache_of_a_version_does_not_outlive_it() -> None:
    version = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[0]
    volumes = re.findall(r"^    name: (\S+)$", (ROOT / "docker" / "compose.yaml").read_text(), re.M)
    assert len(volumes) == 2
    assert all(volume.endswith(f"-{version}") for volume in volumes)


@pytest.mark.parametrize("script", sorted((ROOT / "docker").glob("*.sh")), ids=lambda path: path.name)
def test_scripts_stop_at_the_first_failure(script: Path) -> None:
    assert "\nset -euo pipefail\n" in script.read_text()


def test_a_stage_that_does_not_exist_is_refused_with_the_list() -> None:
    done = subprocess.run(
        ["bash", "docker/run_tests.sh", "everything"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    for stage in ("host", "device", "rocm"):
        assert f"run_tests.sh {stage}" in done.stderr
