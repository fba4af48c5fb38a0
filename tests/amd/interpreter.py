"""Triton's interpreter without repeated work and unread results, which take most of its time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any


def make_fast() -> None:
    """Changes the interpreter of this process, which Triton's import has chosen."""
    from triton.runtime import interpreter

    builder, tl = interpreter.interpreter_builder, interpreter.tl
    # It would look for overflows with each addition, and report them only in debug mode.
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    patch, dtype_of = interpreter._patch_lang, interpreter._get_np_dtype
    dtype_of_scalar = functools.cache(dtype_of)

    @functools.cache
    def languages(function: Callable[..., Any]) -> list[Any]:
        return [each for each in function.__globals__.values() if each is tl or each is tl.core]

    def patch_once(function: Callable[..., Any]) -> Any:
        """Replaces the language's functions for a kernel; a function that the kernel calls finds them replaced."""
        found = languages(function)
        if found and not any(tl.core.is_builtin(language.load) for language in found):
            return None
        return patch(function)

    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = lambda dtype: (dtype_of_scalar if type(dtype) is tl.dtype else dtype_of)(dtype)
