"""Modules that stand for those of an engine."""

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest


def modules_of(values: Mapping[str, Mapping[str, Any]]) -> dict[str, ModuleType]:
    """Returns modules with these values, by name, and the packages that they are in. Each is a package too."""
    made: dict[str, ModuleType] = {}
    for name, own in values.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in made:
                made[path] = ModuleType(path)
                made[path].__path__ = []
                if end > 1:
                    setattr(made[path.rpartition(".")[0]], parts[end - 1], made[path])
        vars(made[name]).update(own)
    return made


def install(monkeypatch: pytest.MonkeyPatch, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Lets imports find modules with these values during a test. Packages that they are in are new and empty."""
    for name, module in modules_of(values).items():
        monkeypatch.setitem(sys.modules, name, module)
