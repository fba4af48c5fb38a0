"""Triton's interpreter without work whose results it drops: its tests take a third of the time."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any


def make_quick() -> None:
    """Replaces parts of the interpreter, for the rest of the process, by parts with the same results."""
    from triton.runtime import interpreter

    patch_once_per_launch()
    # Each sum, difference and product is computed again in 64 bits for an assertion that is made in debug mode alone.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    keep_dtypes()
    keep_shapes()


def keep_dtypes() -> None:
    """Makes the interpreter look a type's NumPy type up: it builds the table of all types each time."""
    from triton.runtime import interpreter

    find, found = interpreter._get_np_dtype, dict[str, Any]()

    def look_up(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    interpreter._get_np_dtype = look_up


def keep_shapes() -> None:
    """Makes types of blocks, and the shapes and sizes of tensors, once each: every operation makes several of both."""
    from triton import language
    from triton.runtime import interpreter

    @cache
    def of_numbers(element: Any, *shape: int) -> Any:
        return language.block_type(element, list(shape))

    def block_type(element: Any, shape: Any) -> Any:
        """Pointers have no hash."""
        return language.block_type(element, shape) if element.is_ptr() else of_numbers(element, *shape)

    make, made = language.tensor.__init__, dict[tuple[int, ...], tuple[Any, Any]]()

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in made:
            make(self, handle, type)
            made[shape] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = made[shape]

    language.block_type.with_element_ty = lambda self, element: block_type(element, self.shape)
    interpreter.InterpreterBuilder.get_block_ty = lambda self, element, shape: block_type(element, shape)
    language.tensor.__init__ = make_tensor


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
