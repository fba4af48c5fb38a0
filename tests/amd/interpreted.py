"""Triton's interpreter, made faster: it replaces the names of triton.language once a launch and module.

As it comes, it does so again at every call of a jitted function, which takes a third of its time. A launch undoes the
replacement when it ends, and only then: until that the names of a module stay what the first call has made them.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any


def replace_names_once() -> None:
    """Changes the interpreter of this process, in which kernels are interpreted (TRITON_INTERPRET=1)."""
    from triton.runtime import interpreter

    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    # Ids of the modules' globals. Threads share the names, so they share this set too.
    replaced: set[int] = set()

    def replace_once(fn: FunctionType) -> Any:
        module = id(fn.__globals__)
        if module in replaced:
            return None  # for the launch itself; calls of functions ignore what is returned
        changes = replace(fn)
        replaced.add(module)
        return changes

    def launch_anew(executor: Any, *args: Any, **options: Any) -> None:
        replaced.clear()
        try:
            launch(executor, *args, **options)
        finally:
            replaced.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_once, launch_anew
