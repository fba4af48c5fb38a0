"""The project's own source files for the house tests: paths, module names, imports."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]

# Distribution's package -> its folders, each with the package that it is imported as. Two folders of rocm_attn are also
# linked into it.
HOUSES = {
    "rocm_attn": {"rocm_attn": "rocm_attn", "kernels": "rocm_attn.kernels", "hip_graphs": "rocm_attn.hip_graphs"},
    "rocm_serve": {"rocm_serve": "rocm_serve"},
    "rocm_lab": {"rocm_lab": "rocm_lab"},
}
# Scripts that are run from a checkout and are in no wheel.
SCRIPTS = "benchmarks"


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module. at_import: true if importing the importer imports it, false if a call does"""

    module: str
    at_import: bool


@dataclass(frozen=True, slots=True)
class Source:
    """One file of the package: its path, the name it is imported as, whether it is a package, and its syntax tree."""

    path: Path
    module: str
    is_package: bool
    tree: ast.Module

    def imports(self) -> tuple[Import, ...]:
        """Returns every import of the file, absolute; `from a import b` names a.b, which may or may not be a module."""
        return _imports_of(self)


@cache
def _imports_of(source: Source) -> tuple[Import, ...]:
    return tuple(_imports(source.tree, at_import=True))


@cache
def sources() -> tuple[Source, ...]:
    """Returns every Python file of the three packages, but for scripts."""
    return tuple(source for house in HOUSES for source in sources_of(house))


@cache
def sources_of(house: str) -> tuple[Source, ...]:
    """Returns every Python file of one package, but for scripts."""
    found = []
    for folder, package in HOUSES[house].items():
        for path in python_files(ROOT / folder):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            module = ".".join((package, *(parts[:-1] if is_package else parts)))
            found.append(Source(path, module, is_package, ast.parse(path.read_text(), str(path))))
    return tuple(found)


def python_files(folder: Path) -> list[Path]:
    """Returns every Python file under folder, except links, which lead to another level, and scripts."""
    return files_of(folder, ".py")


def files_of(folder: Path, *suffixes: str) -> list[Path]:
    """Returns the files under folder with these suffixes, except links and scripts."""
    found = sorted(path for path in folder.iterdir() if path.suffix in suffixes)
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not child.is_symlink() and child.name != SCRIPTS:
            found += files_of(child, *suffixes)
    return found


def belongs_to(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _imports(node: ast.AST, *, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(name.name, at_import) for name in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: imports are absolute in this project"
            yield from (Import(f"{child.module}.{name.name}", at_import) for name in child.names)
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield from _imports(child, at_import=False)
        elif not isinstance(child, ast.expr):  # an expression holds no statement
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports(child, at_import=at_import and not is_function)
