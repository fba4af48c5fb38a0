"""Files of AITER at one release, read from a clone's git objects. Nothing is checked out or imported."""

import ast
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

VARIABLE = "AITER_SOURCE"

FunctionNode = ast.FunctionDef


@dataclass(frozen=True)
class SourceTree:
    """AITER's Python files at a tag or a commit. root: a clone of ROCm/aiter, or its git directory"""

    root: Path
    revision: str

    @cached_property
    def files(self) -> Mapping[str, str]:
        """Path -> blob of each Python file of the package."""
        lines = git(self.root, "ls-tree", "-r", self.revision, "--", "aiter").splitlines()
        split = [line.split("\t", 1) for line in lines]
        return {path: facts.split()[2] for facts, path in split if path.endswith(".py")}

    @property
    def commit(self) -> str:
        """The hash of its commit."""
        return git(self.root, "rev-parse", f"{self.revision}^{{commit}}").strip()

    @property
    def date(self) -> str:
        """The day of its commit."""
        return git(self.root, "show", "--no-patch", "--format=%cs", f"{self.revision}^{{commit}}").strip()

    def functions(self, path: str) -> Mapping[str, FunctionNode]:
        """The functions of a file by name, the last definition of each; methods are left out."""
        return _functions(self.root, self.files[path])

    def file_of(self, place: str, name: str) -> str:
        """The file that defines a function which can be imported from a module; empty if there is none.

        The package `aiter` itself has what it imports with a star; the last definition counts.
        """
        files = self._starred() if place == "aiter" else (f"{place.replace('.', '/')}.py",)
        found = [path for path in files if path in self.files and name in self.functions(path)]
        return found[-1] if found else ""

    def _starred(self) -> Iterator[str]:
        for node in ast.walk(_parsed(self.root, self.files["aiter/__init__.py"])):
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.names[0].name == "*" and node.module:
                yield f"aiter/{node.module.replace('.', '/')}.py"


def clone_named() -> Path:
    """The clone that AITER_SOURCE names. Raises ValueError if it names none."""
    folder = os.environ.get(VARIABLE, "")
    if not folder:
        raise ValueError(f"{VARIABLE} is not set; set it to the folder of a clone of github.com/ROCm/aiter, with tags")
    return Path(folder).resolve()


def git(folder: Path, *arguments: str) -> str:
    """Returns the output of a git command. Raises CalledProcessError."""
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=True).stdout


@cache
def _functions(root: Path, blob: str) -> Mapping[str, FunctionNode]:
    return {node.name: node for node in _parsed(root, blob).body if isinstance(node, ast.FunctionDef)}


@cache
def _parsed(root: Path, blob: str) -> ast.Module:
    return ast.parse(git(root, "cat-file", "blob", blob))
