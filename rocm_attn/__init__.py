"""A ROCm-first attention runtime: `import rocm_attn as ra`, and then `ra.build_runtime`, `ra.StepRunner` and so on.

Its stable names are those of __init__.pyi. Each is imported when it is first used: importing rocm_attn itself imports
no other module of the package, and not torch. See docs/stability.md, docs/names.md and docs/architecture.md.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from typing import Any


def _modules_of_names() -> dict[str, str]:
    """Maps each stable name to its module. Type checkers read the same file, so neither is named in two places."""
    stub = pkgutil.get_data(__name__, "__init__.pyi")
    assert stub is not None
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    return {name.name: str(node.module) for node in imports for name in node.names}


_MODULE_OF = _modules_of_names()
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Returns a stable name when it is used for the first time (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; docs/names.md lists what it has")
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    """All names of the module, including those that were not used yet."""
    return sorted({*globals(), *__all__})
