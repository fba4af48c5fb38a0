"""Releases of AITER that were never read: who says so, in which words, and which ones are not built."""

from __future__ import annotations

import json
import logging
import re
import runpy
import sys
from pathlib import Path

import pytest

from rocm_attn.cli import main
from rocm_attn.machine import aiter_releases
from rocm_attn.machine.aiter_releases import not_read, releases, too_old, written_for
from rocm_attn.machine.releases import UNKNOWN, Release, aiter_not_read
from rocm_attn.machine.target import IMAGE_RELEASES
from rocm_attn.selection import kernels
from tests.amd.aiter.serving import plain_problem, world
from tests.amd.aiter.signatures import E4048607
from tests.amd.aiter.signatures import Release as Signatures
from tests.amd.aiter.stand_in import install
from tests.amd.house.source_tree import ROOT

HERE = Path(__file__).parent / "configs"


@pytest.mark.parametrize(
    "version",
    [
        "v0.1.20",
        "0.1.20.post1+rocm7.2",
        "0.1.19.post2",
        "0.1.21.dev46",
        "0.1.21.dev46+ge4048607a",
        "0.1.21.dev46+ge4048607a5.d20261001",
        "e4048607a535ace3a2b51ded31b1c8c2d45c0879",
        "e4048607",
    ],
)
def test_a_release_that_was_read_is_known_by_each_of_its_names(version: str) -> None:
    assert not_read(version) == ""


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.1.29+rocm7.2", "AITER 0.1.29+rocm7.2 was never read;"),
        ("0.1.22", "AITER 0.1.22 was never read beyond its release notes;"),
        ("v0.1.23", "AITER v0.1.23 was never read beyond its title;"),
        ("0.2.0", "AITER 0.2.0 was never read;"),
        ("0.1.20.post9", "AITER 0.1.20.post9 was never read;"),
        ("0.1.21.dev47+g1234567", "AITER 0.1.21.dev47+g1234567 was never read;"),
        ("0.1.21.dev46+g1234567", "AITER 0.1.21.dev46+g1234567 was never read;"),
        ("0.1.20rc1", "AITER 0.1.20rc1 was never read;"),
        ("d9e5ef7ce08ee7045d583aed768cff41aa9210fe", "AITER d9e5ef7ce08ee7045d583aed768cff41aa9210fe was never read;"),
        ("", "AITER's release is not known;"),
    ],
)
def test_another_release_is_said_to_be_unread_in_one_sentence(version: str, said: str) -> None:
    sentence = not_read(version)
    assert sentence == f"{said} this version of rocm_attn was written for {written_for()}"


def test_the_releases_are_in_the_order_in_which_they_were_made() -> None:
    in_order = [Release.of(each.name) for each in releases()]
    assert in_order == sorted(set(in_order))
    # Reading stops somewhere, and nothing after it was read.
    was_read = [each.was_read for each in releases()]
    assert was_read == sorted(was_read, reverse=True)
    assert {each.read for each in releases()} <= {"tree", "functions", "notes", "title", "nothing"}


def test_the_image_has_the_newest_commit_that_was_read() -> None:
    newest = [each for each in releases() if each.read == "tree"][-1]
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    assert re.findall(r"^ARG AITER_COMMIT=(\S+)$", dockerfile, re.MULTILINE) == [newest.commit]
    assert Release.of(newest.name) == IMAGE_RELEASES.aiter
    assert aiter_not_read(IMAGE_RELEASES.aiter) == ""


def test_the_range_is_written_once() -> None:
    first = written_for().split()[1]
    for folder in ("rocm_attn", "rocm_lab", "rocm_serve"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "aiter_releases.py":
                assert f"{first} to v" not in path.read_text(), path


@pytest.mark.parametrize(
    ("version", "may_build", "said"),
    [
        ("e4048607a535ace3a2b51ded31b1c8c2d45c0879", True, "was read"),
        ("v0.1.19", True, "AITER v0.1.19 was read"),
        ("v0.1.23", True, "was never read beyond its title; "),
        ("0.1.30", True, "AITER 0.1.30 was never read; "),
        ("v0.1.14.post1", False, "AITER v0.1.14.post1 is older than v0.1.15, the first that is served"),
    ],
)
def test_a_build_is_told_of_its_release_before_it_starts(
    version: str, may_build: bool, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["aiter_releases.py", version])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(aiter_releases.__file__), run_name="__main__")
    printed = capsys.readouterr()
    assert said in (printed.out if may_build else printed.err)
    assert (printed.out + printed.err).count("\n") == 1
    assert ended.value.code == (0 if may_build else 1)


@pytest.mark.parametrize("version", ["v0.1.15", "0.1.15.post1", "0.1.29", "", "e4048607", "a build of our own"])
def test_a_release_from_the_first_on_and_one_that_is_not_known_are_not_too_old(version: str) -> None:
    assert too_old(version) == ""


def explained(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["explain", str(HERE / "llama-3-8b.json"), "--arch", "gfx942", *options]) == 0
    return capsys.readouterr().out


def test_explain_marks_the_kernels_of_a_release_that_was_never_read(capsys: pytest.CaptureFixture[str]) -> None:
    printed = explained(capsys, "--aiter-release", "0.1.23")
    assert "AITER v0.1.23 was never read beyond its title; " in printed
    assert "  decode: aiter.paged_attention_ragged (not read)\n" in printed
    assert "  shared: triton.shared_prefix\n" in printed, "a kernel that is not AITER's was read"
    assert json.loads(explained(capsys, "--aiter-release", "0.1.23", "--json"))["aiter_not_read"]
    for release in ("0.1.20", "0.1.20.post1"):
        assert "not read" not in explained(capsys, "--aiter-release", release)
    assert json.loads(explained(capsys, "--json"))["aiter_not_read"] == ""


def test_a_release_that_is_not_known_counts_as_unread() -> None:
    assert aiter_not_read(UNKNOWN).startswith("AITER's release is not known;")


def test_a_release_that_was_never_read_serves_after_its_probe_and_a_log_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels._warn_once.cache_clear()
    install(Signatures("0.1.29", E4048607.parameters), monkeypatch)
    with caplog.at_level(logging.WARNING, logger=kernels.__name__):
        world(plain_problem(16, dims=(128, 128)))
    (said,) = [record.getMessage() for record in caplog.records if "never read" in record.getMessage()]
    assert said.startswith("AITER 0.1.29 was never read; ")
    assert said.endswith("its kernels serve because their parameters agree and their probe passed")
