"""The action for GitHub: its file is what GitHub reads, and its steps compare two commits of a repository."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rocm_lab.simulator import compare

ACTION = Path(compare.__file__).with_name("action.yml")

KERNELS = """\
import triton
import triton.language as tl


@triton.jit
def scaled(source, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(source + at, mask=at < n, other=0), mask=at < n)


@triton.jit
def summed(source, out, BLOCK: tl.constexpr):
    tl.store(out, tl.sum(tl.load(source + tl.arange(0, BLOCK))))
"""
SCRIPT = """\
import torch
from kernels import scaled, summed

source, out = torch.arange(200.0), torch.zeros(200)
scaled[(2,)](source, out, 200, BLOCK=128, num_warps=2)
assert torch.equal(out, 2 * source)
summed[(1,)](source, out, BLOCK=128, num_warps=2)
assert out[0] == 127 * 64
"""


def git(folder: Path, *arguments: str) -> str:
    """Returns the output of a git command by an author that no setting of this machine names."""
    named = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *named, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def committed(folder: Path, **files: str) -> str:
    """Writes files NAME.py, commits them, and returns the commit's hash."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "a change")
    return git(folder, "rev-parse", "--short=10", "HEAD")


def step(name: str) -> str:
    """The script of one of the action's steps."""
    (script,) = (each["run"] for each in yaml.safe_load(ACTION.read_text())["runs"]["steps"] if each["name"] == name)
    assert isinstance(script, str)
    return script


def run_step(name: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a step in a folder as GitHub does, with `python` being this interpreter."""
    bin_folder = folder.with_name("bin")
    bin_folder.mkdir(exist_ok=True)
    if not (bin_folder / "python").exists():
        (bin_folder / "python").symlink_to(sys.executable)
    path = os.pathsep.join((str(Path(sys.executable).parent), str(bin_folder), os.environ["PATH"]))
    environment = os.environ | variables | {"PATH": path, "RUNNER_TEMP": str(folder.parent)}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step(name)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    return folder


def test_the_action_is_one_by_the_public_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-actions", str(ACTION)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_an_action_is_given_reaches_its_scripts_as_variables_alone() -> None:
    """A title or a path with a quote in it would be a command where GitHub writes it into a script."""
    for each in yaml.safe_load(ACTION.read_text())["runs"]["steps"]:
        assert "${{" not in each["run"]


def test_two_commits_are_compared(repository: Path) -> None:
    base = committed(repository, kernels=KERNELS, check=SCRIPT)
    wider = SCRIPT.replace("(2,)](source, out, 200, BLOCK=128", "(1,)](source, out, 200, BLOCK=256")
    committed(repository, kernels=KERNELS, check=wider)
    done = run_step("Simulate", repository, BASE="HEAD~1", SCRIPTS="check.py\n\n")
    assert done.returncode == 0, done.stderr
    comment = (repository.parent / "simulated.md").read_text()
    lines = comment.splitlines()
    assert lines[0] == compare.MARK
    assert lines[1] == f"### Kernels as AMD machine code, compared with {base}"
    assert lines[3] == "Every script passed: no access outside of an array."
    assert lines[5].endswith("| clocks of the loop | instructions executed | races | waits |")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[7:]]
    assert [row[:2] for row in rows] == [
        [f"`{k}`", arch] for arch in ("gfx942", "gfx950") for k in ("scaled", "summed")
    ]
    for kernel, *cells in rows:
        changed = [cell for cell in cells if re.fullmatch(r"\d+ → \*\*\d+\*\*", cell)]
        assert bool(changed) == (kernel == "`scaled`"), cells
        assert cells[-1] == "proved"
    assert git(repository, "worktree", "list").count("\n") == 0


@pytest.mark.nightly
def test_a_kernel_that_does_not_pass_fails_and_is_named(repository: Path) -> None:
    committed(repository, kernels=KERNELS, old=SCRIPT)
    broken = KERNELS.replace("mask=at < n, other=0", "mask=at < n + 1, other=0").replace("def summed", "def added")
    committed(repository, kernels=broken, old="", new=SCRIPT.replace("summed", "added"))
    done = run_step("Simulate", repository, BASE="HEAD~1", SCRIPTS="old.py\nnew.py")
    assert done.returncode == 1
    comment = (repository.parent / "simulated.md").read_text()
    assert "- `old.py` on gfx942: no kernel was launched" in comment
    assert "- `new.py` on gfx950: SimulationFault: scaled, program (1, 0, 0)" in comment
    assert "No longer launched: `scaled` on gfx942, `summed` on gfx942, `scaled` on gfx950" in comment


def test_the_comment_goes_to_the_summary_and_the_pull_request(repository: Path) -> None:
    (repository.parent / "simulated.md").write_text("a comment\n")
    tools = repository.parent / "bin"
    tools.mkdir()
    (tools / "gh").write_text('#!/bin/sh\necho "$@" > "$RUNNER_TEMP/asked"\n')
    (tools / "gh").chmod(0o755)
    summary = repository.parent / "summary"
    given: dict[str, Any] = {"GITHUB_STEP_SUMMARY": str(summary), "NUMBER": "7"}
    assert run_step("Comment", repository, GH_TOKEN="", **given).returncode == 0
    assert summary.read_text() == "a comment\n"
    assert not (repository.parent / "asked").exists()
    assert run_step("Comment", repository, GH_TOKEN="t", **given).returncode == 0
    assert (repository.parent / "asked").read_text().startswith("pr comment 7 --body-file")
    (tools / "gh").write_text("#!/bin/sh\nexit 1\n")
    refused = run_step("Comment", repository, GH_TOKEN="t", **given)
    assert refused.returncode == 0
    assert refused.stdout.startswith("::warning::The comment could not be written")
    (repository.parent / "simulated.md").unlink()
    assert run_step("Comment", repository, GH_TOKEN="t", **given).returncode == 0


def test_a_base_that_is_not_there_is_named(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    committed(repository, check=SCRIPT)
    monkeypatch.chdir(repository)
    with pytest.raises(SystemExit, match="2"):
        compare.main(["--base", "gone", "--output", "comment.md", "check.py"])
    assert "the commit gone is not in this checkout; fetch it" in capsys.readouterr().err
