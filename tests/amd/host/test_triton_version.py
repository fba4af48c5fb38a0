"""The installed Triton's version, under each name of its distribution, and layers that it compiles wrongly; AITER's."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton

from rocm_attn.cli.env import environment
from rocm_attn.errors import Unsupported
from rocm_attn.machine.distributions import TRITON_DISTRIBUTIONS
from rocm_attn.machine.releases import UNKNOWN, Release, installed_releases, triton_version
from rocm_attn.machine.settings import interprets_kernels
from rocm_attn.machine.target import Target, detect_target, known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.select import select


def install(folder: Path, *distributions: tuple[str, str]) -> None:
    """Writes the name and the version of each distribution, as pip does."""
    for name, version in distributions:
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the only folder of distributions, empty at first."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_a_clone_of_aiter_in_the_working_directory_is_no_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "aiter" / "aiter").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert environment()["versions"]["aiter"] is None


@pytest.mark.parametrize("name", TRITON_DISTRIBUTIONS)
def test_the_version_is_found_under_every_name(site: Path, name: str) -> None:
    install(site, (name, "3.6.0+rocm7.2.git1"))
    assert triton_version() == "3.6.0+rocm7.2.git1"
    assert installed_releases().triton == Release.of("3.6.0")
    assert environment()["versions"]["triton"] == "3.6.0+rocm7.2.git1"


def test_of_two_releases_none_is_believed(site: Path) -> None:
    """The last installed one overwrote the other's files, and no file shows which one that was."""
    install(site, ("pytorch-triton-rocm", "3.6.0"), ("triton", "3.9.0"))
    assert triton_version() == ""
    assert installed_releases().triton == UNKNOWN


def _sm_90(triton: str) -> Target:
    target = known_target("sm_90")
    return replace(target, releases=replace(target.releases, triton=Release.of(triton)))


@pytest.mark.parametrize("dims", [(24, 8), (40, 24), (64, 32), (128, 16), (128, 32), (256, 32)], ids=str)
def test_deterministic_kernels_that_ptxas_breaks(dims: tuple[int, int]) -> None:
    layer = Problem(3, 1, dims[0], torch.bfloat16, 4, v_head_dim=dims[1])
    with pytest.raises(Unsupported, match="no deterministic kernel"):
        select(layer, _sm_90("3.6.0"), "triton", deterministic=True)
    assert select(layer, _sm_90("3.9.0"), "triton", deterministic=True).kernels
    assert select(layer, _sm_90("3.6.0"), "triton").kernels
    for served in (dims[0], 64):
        assert select(replace(layer, v_head_dim=served), _sm_90("3.6.0"), "triton", deterministic=True).kernels


@pytest.mark.parametrize(
    "value", ["1", "true", "TRUE", "on", "Yes", "y", "0", "false", "off", "", " ", " 1", "2", "+1"]
)
def test_the_interpreter_is_on_where_triton_says_so(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four places read the variable, each in its own way: `false` was on for the doctor, and `true` off on a CPU."""
    monkeypatch.setenv("TRITON_INTERPRET", value)
    is_on = triton.knobs.runtime.interpret
    assert interprets_kernels(os.environ) == is_on
    assert detect_target(torch.device("cpu")).arch == ("interpreter" if is_on else "cpu")
