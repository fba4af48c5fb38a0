"""Triton's interpreter without repeated work and unread results, which take most of its time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def make_fast() -> None:
    """Changes the interpreter of this process, which Triton's import has chosen."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    # It would look for overflows with each addition, and report them only in debug mode.
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    patch, builtins = interpreter._patch_builtin, dict[Any, str]()

    def patch_once(module: Any, *scope: Any) -> None:
        """Puts the interpreter's functions in the places of a module's, unless a function that calls this one has."""
        if module not in builtins:
            is_builtin = interpreter.tl.core.is_builtin
            builtins[module] = next((name for name in dir(module) if is_builtin(getattr(module, name))), "")
        name = builtins[module]
        if name and interpreter.tl.core.is_builtin(getattr(module, name)):
            patch(module, *scope)

    interpreter._patch_builtin = patch_once
