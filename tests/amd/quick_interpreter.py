"""A third of the time of Triton's interpreter: it patches its language anew for each call of a device function."""

from collections.abc import Callable
from functools import cache
from typing import Any


def patch_once_per_launch() -> None:
    """Makes the interpreter patch the modules that a device function sees once in each launch.

    The launch's own patches last until it ends, and those of device functions to the end of the process.
    """
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched = set[tuple[bool, bool]]()

    @cache
    def seen_by(function: Callable[..., Any]) -> tuple[bool, bool]:
        seen = [id(value) for value in function.__globals__.values()]
        return id(language) in seen, id(language.core) in seen

    def patch_once(function: Callable[..., Any]) -> interpreter._LangPatchScope:
        if seen_by(function) in patched:
            return interpreter._LangPatchScope()
        scope = patch(function)
        patched.add(seen_by(function))
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_once
