"""Spares Triton's interpreter two kinds of work that are done again and again.

At each launch of a jitted function, and again whenever it calls another, the interpreter searches all of
triton.language for functions and replaces them by its own: two thirds of the time of an interpreted test. Here the
names are searched once, and a call does not repeat the replacement of its launch. The replacements and their lifetime
stay Triton's own work, and so does everything that it computes.

Every sum and product of integers was computed again in 64 bits, to look for an overflow that the interpreter reports
with its option `debug` only, which it never sets. Its option for that is off here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class _OfLaunch:
    """The replacements of a launch, until restore()."""

    def __init__(self, scope: Any, active: set[Any], added: set[Any]) -> None:
        self._scope, self._active, self._added = scope, active, added
        active |= added

    def restore(self) -> None:
        self._scope.restore()
        self._active -= self._added


class _OfCall:
    """The replacements of a call within a launch: none."""

    def restore(self) -> None:
        raise AssertionError("only a launch restores triton.language")


def quicken() -> None:
    """Spares the interpreter of this process repeated work. Call it once, before any launch."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "overflows are reported: they must be looked for"
    builder.options = replace(builder.options, sanitize_overflow=False)
    _search_once()


def _search_once() -> None:
    """Searches triton.language once for the functions that the interpreter replaces."""
    core = tl.core
    places = tl, core, tl.math, core.tensor, core.tensor_descriptor_base
    names = {place: [name for name, member in inspect.getmembers(place) if core.is_builtin(member)] for place in places}
    search, patch, active = interpreter._patch_builtin, interpreter._patch_lang, set[Any]()
    replacements: dict[Any, Any] = {}
    # By a module's names for triton.language, which do not change.
    languages: dict[int, tuple[dict[str, Any], set[Any]]] = {}

    def search_names(place: Any, *others: Any) -> None:
        if place not in names:
            search(place, *others)
            return
        for name in names[place]:
            member = getattr(place, name)
            if core.is_builtin(member):
                if member not in replacements:
                    replacements[member] = _called_by_interpreter(member)
                others[-1].set_attr(place, name, replacements[member])

    def patch_in_launch(function: FunctionType) -> _OfLaunch | _OfCall:
        names_of = function.__globals__
        if id(names_of) not in languages:
            languages[id(names_of)] = names_of, {each for each in names_of.values() if each is tl or each is core}
        seen = languages[id(names_of)][1]
        if seen and seen <= active:
            return _OfCall()
        return _OfLaunch(patch(function), active, seen - active)

    interpreter._patch_builtin = search_names
    interpreter._patch_lang = patch_in_launch


def _called_by_interpreter(member: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the replacement of a builtin during a launch, as Triton makes it."""
    given = interpreter.interpreter_semantic

    def call(*args: Any, **named: Any) -> Any:
        named["_semantic"] = given
        return member(*args, **named)

    return call
