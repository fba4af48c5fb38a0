"""Makes Triton's interpreter quicker, which then computes the same.

Whenever a jitted function is launched, and again whenever it calls another, the interpreter searches all of
triton.language for functions and replaces them by its own. That took half of the time of an interpreted test. Here the
names are searched once, and a call does not replace what its launch has replaced. By what, and until when, stays
Triton's own work.

Half of the rest went into three more things. Every sum and product of integers was done again in 64 bits, to look for
an overflow that the interpreter reports with `debug` only, which it never sets. A table of types was built whenever a
type was looked up. Types and shapes of tensors were made anew for each operation; here equal ones are one object.

Of what was left then, most was which type the result of an operation has, asked anew for each one: see
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


def quicken() -> None:
    """Spare the interpreter of this process its repeated work. Call it once, before any launch."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "overflows are reported: they must be looked for"
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _once_a_name(interpreter._get_np_dtype)
    _share_types_and_shapes()
    quick_operations.remember_types()
    _search_once()


def _once_a_name(of_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function of a type, asked once for all types of one name."""
    known: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = of_type(dtype)
        return known[name]

    return look_up


def _share_types_and_shapes() -> None:
    """Make the type of a block, and the shape of a tensor, once for all that are equal."""
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
        """What tensor.__init__ does."""
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
    """Search triton.language once for what the interpreter replaces."""
    core = tl.core
    places = tl, core, tl.math, core.tensor, core.tensor_descriptor_base
    names = {place: [name for name, member in inspect.getmembers(place) if core.is_builtin(member)] for place in places}
    search, patch, active = interpreter._patch_builtin, interpreter._patch_lang, set[Any]()
    replacements: dict[Any, Any] = {}
    # By a module's names: what they call triton.language, which a module does not change.
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
