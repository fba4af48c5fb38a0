"""Triton's interpreter, with two of its answers remembered, which takes half of its time.

Triton itself replaces the names of triton.language again at every call of a jitted function. A launch undoes the
replacement when it ends, and only then: until that the names of a module stay what the first call has made them. And
for every operation it makes a table of all NumPy types.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any


def interpret_faster() -> None:
    """Changes the interpreter of this process, in which kernels are interpreted (TRITON_INTERPRET=1)."""
    _replace_names_once_a_launch()
    _remember_types()


def _remember_types() -> None:
    from triton.runtime import interpreter

    look_up = interpreter._get_np_dtype
    of_number = cache(look_up)

    def numpy_type(dtype: Any) -> Any:
        # Types of pointers and of blocks cannot be keys; a block has the NumPy type of its elements.
        element = dtype.scalar
        return look_up(element) if element.is_ptr() else of_number(element)

    interpreter._get_np_dtype = numpy_type


def _replace_names_once_a_launch() -> None:
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
