"""Makes Triton's interpreter faster without changing its results.

The interpreter searches all of triton.language for functions and replaces them by its own: at each launch of a jitted
function, and again whenever it calls another. That took half of the time of an interpreted test. Here the names are
searched once, and a call does not repeat the replacement of its launch. The replacements and their lifetime stay
Triton's own work.

Half of the rest went into three more things. Every sum and product of integers was computed again in 64 bits, to look
for an overflow that the interpreter reports with `debug` only, which it never sets. A table of types was built at each
look-up of a type. Types and shapes of tensors were created again for each operation; here equal ones are one object.

Most of the remaining time went into the type of each operation's result, derived again for each one: see
quick_operations.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

from tests.amd import quick_operations


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
    interpreter._get_np_dtype = _once_a_name(interpreter._get_np_dtype)
    _share_types_and_shapes()
    quick_operations.remember_types()
    _search_once()


def _once_a_name(of_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns the same function of a type, called once for all types of one name."""
    known: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = of_type(dtype)
        return known[name]

    return look_up


def _share_types_and_shapes() -> None:
    """Creates the type of a block, and the shape of a tensor, once for all that are equal."""
    core = tl.core
    blocks: dict[tuple[str, tuple[int, ...]], Any] = {}
    of_sizes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    # By the name of a tensor's type.
    shapes: dict[str, tuple[Any, Any]] = {}

    def block_of(element: Any, shape: Any) -> Any:
        key = element.name, tuple(shape)
        if key not in blocks:
            blocks[key] = core.block_type(element, list(key[1]))
        return blocks[key]

    def init_tensor(tensor: Any, handle: Any, type: Any) -> None:
        """Does the same as `tensor.__init__`."""
        if type.name not in shapes:
            sizes = tuple(type.shape.values) if type.is_block() else ()
            if sizes not in of_sizes:
                made = object.__new__(core.tensor)
                make_tensor(made, handle, type)
                of_sizes[sizes] = made.shape, made.numel
            shapes[type.name] = of_sizes[sizes]
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = shapes[type.name]

    make_tensor = core.tensor.__init__
    core.tensor.__init__ = init_tensor
    core.block_type.with_element_ty = lambda block, element: block_of(element, block.shape)
    interpreter.InterpreterBuilder.get_block_ty = lambda builder, element, shape: block_of(element, shape)
    quick_operations.broadcast_by_shape(block_of)


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
                    replacements[member] = quick_operations.called_by_interpreter(member)
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
