"""Makes Triton's interpreter quicker.

Whenever a jitted function is launched, and again whenever it calls another, the interpreter searches all of
triton.language for functions and replaces them by its own. That took half of the time of an interpreted test. Here the
names are searched once, and a call does not replace what its launch has replaced. By what, and until when, stays
Triton's own work.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class _OfLaunch:
    """What a launch has replaced, until restore()."""

    def __init__(self, scope: Any, active: set[Any], added: set[Any]) -> None:
        self._scope, self._active, self._added = scope, active, added
        active |= added

    def restore(self) -> None:
        self._scope.restore()
        self._active -= self._added


class _OfCall:
    """What a call within a launch replaces: nothing."""

    def restore(self) -> None:
        raise AssertionError("only a launch restores triton.language")


def search_once() -> None:
    """Spare the interpreter of this process its repeated searches. Call it once, before any launch."""
    core = tl.core
    places = tl, core, tl.math, core.tensor, core.tensor_descriptor_base
    names = {place: [name for name, member in inspect.getmembers(place) if core.is_builtin(member)] for place in places}
    search, patch, active = interpreter._patch_builtin, interpreter._patch_lang, set[Any]()

    def search_names(place: Any, *others: Any) -> None:
        if place not in names:
            search(place, *others)
            return
        for name in names[place]:
            member = getattr(place, name)
            if core.is_builtin(member):
                interpreter._patch_attr(place, name, member, *others)

    def patch_in_launch(function: FunctionType) -> _OfLaunch | _OfCall:
        seen = {value for value in function.__globals__.values() if value is tl or value is core}
        if seen and seen <= active:
            return _OfCall()
        return _OfLaunch(patch(function), active, seen - active)

    interpreter._patch_builtin = search_names
    interpreter._patch_lang = patch_in_launch
