"""StableNames: the public names of a package, each imported when it is first used (PEP 562).

The names are those of the package's __init__.pyi. Type checkers read the same file, so no name is written twice.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from typing import Any


class StableNames:
    """The names of a package. namespace: globals() of the package"""

    def __init__(self, package: str, namespace: dict[str, Any]) -> None:
        stub = pkgutil.get_data(package, "__init__.pyi")
        assert stub is not None
        imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
        self._module_of = {name.name: str(node.module) for node in imports for name in node.names}
        self._package, self._namespace = package, namespace

    @property
    def all(self) -> list[str]:
        """The names, in the order of the stub."""
        return list(self._module_of)

    def get(self, name: str) -> Any:
        """Imports a name. Raises AttributeError."""
        if name not in self._module_of:
            raise AttributeError(f"module {self._package!r} has no attribute {name!r}; {self._hint(name)}")
        place = self._module_of[name]
        module = importlib.import_module(place) if place != self._package else None
        has_it = module is not None and hasattr(module, name)
        value = getattr(module, name) if has_it else importlib.import_module(f"{place}.{name}")
        self._namespace[name] = value
        return value

    def _hint(self, name: str) -> str:
        """Where a name is that is not at the top."""
        for tier in (each for each, place in self._module_of.items() if place == f"{self._package}.stable"):
            if hasattr(self.get(tier), name):
                return f"it is {self._package}.{tier}.{name}"
        return "docs/names.md lists its names"

    def dir(self) -> list[str]:
        """All names of the module, including those that were not used yet."""
        return sorted({*self._namespace, *self._module_of})
