"""StableNames: the public names of a package, each imported when it is first used (PEP 562).

The names are those of the package's __init__.pyi. Type checkers read the same file, so no name is written twice.
"""

import ast
import importlib
import pkgutil
from difflib import get_close_matches
from typing import Any


def _names_in(package: str, file: str) -> dict[str, str]:
    """Returns the names that a file of a package imports, each with the module it is from, and those of its classes."""
    text = pkgutil.get_data(package, file)
    assert text is not None
    found: dict[str, str] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom):
            found |= {each.name: str(node.module) for each in node.names}
        elif isinstance(node, ast.ClassDef):
            found[node.name] = package
    return found


class StableNames:
    """The names of a package. namespace: globals() of the package"""

    def __init__(self, package: str, namespace: dict[str, Any]) -> None:
        self._module_of = _names_in(package, "__init__.pyi")
        self._package, self._namespace = package, namespace

    @property
    def all(self) -> list[str]:
        """The names, in the order of the stub."""
        return list(self._module_of)

    def get(self, name: str) -> Any:
        """Imports a name; "__version__" is that of the installed distribution. Raises AttributeError."""
        if name == "__version__":
            return importlib.import_module("rocm_attn.machine.distributions").version_of_package(self._package)
        if name not in self._module_of:
            raise AttributeError(f"module {self._package!r} has no attribute {name!r}; {self._hint(name)}")
        place = self._module_of[name]
        there = vars(importlib.import_module(place))  # the package's own __getattr__ would lead here again
        value = self._namespace[name] = there[name] if name in there else importlib.import_module(f"{place}.{name}")
        return value

    def _hint(self, name: str) -> str:
        """Returns where a name is that is not at the top. Reads files and imports nothing, so it needs no torch."""
        for module, place in self._module_of.items():
            if place in (self._package, f"{self._package}.stable") and name in _names_in(place, f"{module}.py"):
                return f"it is {self._package}.{module}.{name}"
        close = get_close_matches(name, self._module_of, n=1)
        return f"did you mean {close[0]}?" if close else "docs/names.md lists its names"

    def dir(self) -> list[str]:
        """All names of the module, including those that were not used yet."""
        return sorted({*self._namespace, *self._module_of})
