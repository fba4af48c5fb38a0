"""The environment of a reader who installs what a page says and nothing else; the pages' code runs in it.

Its virtual environment has links to those packages of this one's that the page's `pip install` commands name, and to
what these depend on. A page without such a command is for readers who have run `pip install .` alone.
"""

import atexit
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, TextIO

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.amd.house.source_tree import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OURS = {"rocm-attn": ROOT, "rocm-serve": ROOT / "rocm_serve", "rocm-lab": ROOT / "rocm_lab"}
_PLACES = {
    ".": "rocm-attn",
    "wheels/rocm_attn-*.whl": "rocm-attn",
    "./rocm_serve": "rocm-serve",
    "./rocm_lab": "rocm-lab",
}
# A line of a block, or code within a sentence, which a line's end may break.
_PIP_INSTALL = re.compile(r"^pip install ((?:\\\n|[^\n#])+)|`pip install\s([^`]+)`", re.MULTILINE)
_OPTIONS_WITH_VALUES = ("--index-url", "--find-links")

# The tests add this to a page: a tiny model stands for any other. It is one line, so that errors have the page's lines.
_TINY = "import rocm_serve; from tests.amd.runner.tiny_model import load_tiny; rocm_serve.load_model = load_tiny; "


def asked_for(text: str) -> frozenset[str]:
    """Returns the requirements that a page's `pip install` commands name: `rocm-serve[server]`, `openai`."""
    found = {"rocm-attn"}
    for command in _PIP_INSTALL.finditer(text):
        words = iter(shlex.split((command[1] or command[2]).replace("\\\n", " ")))
        for word in words:
            if word in _OPTIONS_WITH_VALUES:
                next(words)
            elif not word.startswith("-"):
                name, bracket, extras = word.partition("[")
                found.add(_PLACES.get(name, name) + bracket + extras)
    return frozenset(found)


def _project(name: str) -> dict[str, Any]:
    """Returns the table `project` of one of this repository's packages."""
    project: dict[str, Any] = tomllib.loads((OURS[name] / "pyproject.toml").read_text())["project"]
    return project


def _requires(name: str) -> list[str]:
    """Returns the requirements of a package, each with its marker. Raises PackageNotFoundError."""
    if name not in OURS:
        return distribution(name).requires or []
    project = _project(name)
    extras = project.get("optional-dependencies", {})
    return [*project["dependencies"], *(f"{each}; extra == '{extra}'" for extra in extras for each in extras[extra])]


def installed_by(requirements: Iterable[str]) -> set[str]:
    """Returns the packages of this environment that pip would install for these requirements, by canonical name."""
    waiting, seen = [Requirement(each) for each in requirements], set[tuple[str, str]]()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        for extra in {"", *wanted.extras} - {extra for other, extra in seen if other == name}:
            seen.add((name, extra))
            try:
                waiting += [
                    each
                    for each in map(Requirement, _requires(name))
                    if each.marker is None or each.marker.evaluate({"extra": extra})
                ]
            except PackageNotFoundError:  # a reader's machine may need it, this one does not have it
                seen.discard((name, extra))
    return {name for name, _ in seen}


def _link(name: str, packages: Path) -> None:
    """Makes a package of this environment importable from another folder, with its metadata."""
    if name not in OURS:
        found = distribution(name)
        for top in {path.parts[0] for path in found.files or []} - {"..", "__pycache__"}:
            if not (packages / top).is_symlink():  # a namespace of several packages is linked once
                (packages / top).symlink_to(Path(str(found.locate_file(top))))
        return
    module, project = name.replace("-", "_"), _project(name)
    (packages / module).symlink_to(ROOT / module)
    metadata = packages / f"{module}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {project['version']}\n")
    groups = project.get("entry-points", {})
    lines = [f"[{group}]\n" + "".join(f"{key} = {place}\n" for key, place in groups[group].items()) for group in groups]
    (metadata / "entry_points.txt").write_text("".join(lines))


def environment() -> dict[str, str]:
    """Returns this process' variables without the one that would bring this environment's packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _virtual_environment(folder: Path, names: Iterable[str]) -> Path:
    """Makes one with links to these packages of this one's, and returns the folder of its packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in names:
        _link(name, packages)
    return packages


@functools.cache
def _before_readers() -> subprocess.Popen[str]:
    """Returns the process that readers are forked from: it has imported torch and has what all of them have."""
    folder = tempfile.TemporaryDirectory()
    _virtual_environment(Path(folder.name), installed_by({"rocm-attn"}) - OURS.keys())
    command = [Path(folder.name) / "bin" / "python", Path(__file__).with_name("reader_process.py")]
    process = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, text=True)

    def end() -> None:
        process.communicate()
        folder.cleanup()

    atexit.register(end)
    return process


def _end(programs: TextIO, answers: TextIO, folder: tempfile.TemporaryDirectory[str]) -> None:
    programs.close()
    answers.read()  # up to the end of the process
    answers.close()
    folder.cleanup()


class Reader:
    """A process in a virtual environment with these requirements alone."""

    def __init__(self, requirements: frozenset[str]) -> None:
        folder = tempfile.TemporaryDirectory()
        venv = Path(folder.name)
        packages = _virtual_environment(venv, installed_by(requirements))
        (packages / "tests").symlink_to(ROOT / "tests")  # a page's code asks for none of them
        self.python = venv / "bin" / "python"
        command = self.python.with_name("rocm-attn")
        command.write_text(f"#!{self.python}\nimport sys\nfrom rocm_attn.cli import main\nsys.exit(main())\n")
        command.chmod(0o755)
        for pipe in ("programs", "answers"):
            os.mkfifo(venv / pipe)
        before = _before_readers()
        assert before.stdin is not None
        print(json.dumps([str(venv), str(packages), environment()]), file=before.stdin, flush=True)
        self._programs, self._answers = (venv / "programs").open("w"), (venv / "answers").open()
        weakref.finalize(self, _end, self._programs, self._answers, folder)

    def run(self, program: str, *, name: str, folder: Path) -> tuple[int, str]:
        """Runs a Python program in a folder and returns its exit code and its output, errors included."""
        text = _TINY + program.lstrip() if "load_model" in program else program
        print(json.dumps([text, name, str(folder)]), file=self._programs, flush=True)
        code, output = json.loads(self._answers.readline())
        return code, output


@functools.lru_cache(maxsize=1)  # a process has torch in its memory; tests are sorted by what they ask for
def reader_with(requirements: frozenset[str]) -> Reader:
    return Reader(requirements)


def reader_of(page: Path) -> Reader:
    return reader_with(asked_for(page.read_text()))
