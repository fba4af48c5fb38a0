"""Operations of Triton's interpreter that look up types which Triton derives again each time.

Triton still computes the results: only the types and shapes of results, constants, and the function of an operation are
remembered. If a case is not known to be equal, Triton handles it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

# The code object of the wrapper that core.builtin puts around functions.
_WRAPPER = tl.core.builtin(lambda: None).__code__
_NUMBERS = (int, float, bool)


def remember_types() -> None:
    """Derives the result type of two types, and the tensor for a number next to a tensor, only once."""
    core, semantic = tl.core, TritonSemantic
    derive, check = semantic.computation_type_impl, semantic.binary_op_type_checking_impl
    types: dict[tuple[Any, ...], Any] = {}
    # True if operands of two types keep their types. Then only their shapes must be checked.
    stays: dict[tuple[Any, ...], bool] = {}
    beside = _Constants()

    def computed(self: Any, one: Any, one_is_scalar: bool, other: Any, other_is_scalar: bool, division: bool) -> Any:
        key = one.name, one_is_scalar, other.name, other_is_scalar, division
        if key not in types:
            types[key] = derive(self, one, one_is_scalar, other, other_is_scalar, division)
        return types[key]

    def checked(self: Any, one: Any, other: Any, *options: Any, **named: Any) -> Any:
        requested = *options, *named.items()
        if type(one) is core.tensor and type(other) is core.tensor:
            pair = one.dtype.name, other.dtype.name, requested
            if stays.get(pair):
                return self.broadcast_impl_value(one, other)
            made = check(self, one, other, *options, **named)
            stays[pair] = all(was.dtype == now.dtype for was, now in zip((one, other), made, strict=True))
            return made
        if type(one) is core.tensor and type(other) in _NUMBERS:
            key = _key(other), one.dtype.name, id(one.shape), requested, True
            if key in beside.known:
                return one, beside.known[key]
            made = check(self, one, other, *options, **named)
            if made[0] is one:
                beside.keep(key, made[1])
            return made
        if type(other) is core.tensor and type(one) in _NUMBERS:
            key = _key(one), other.dtype.name, id(other.shape), requested, False
            if key in beside.known:
                return beside.known[key], other
            made = check(self, one, other, *options, **named)
            if made[1] is other:
                beside.keep(key, made[0])
            return made
        return check(self, one, other, *options, **named)

    semantic.computation_type_impl = computed
    semantic.binary_op_type_checking_impl = checked
    core._unwrap_if_constexpr = _unwrap_by_type(core._unwrap_if_constexpr)
    _compare_types_by_object()
    _describe_blocks_once()
    _make_handles_at_once()


def _key(value: float) -> tuple[Any, type]:
    """Returns the key of a number: 1, True and 1.0 are equal, and so are 0.0 and -0.0."""
    return (value.hex() if type(value) is float else value), type(value)


class _Constants:
    """Tensors of one number. known: the latest ones, which are read-only"""

    _MOST, _MOST_BYTES = 4096, 1 << 14

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], Any] = {}

    def keep(self, key: tuple[Any, ...], tensor: Any) -> None:
        data = tensor.handle.data
        if data.nbytes <= self._MOST_BYTES:
            if len(self.known) >= self._MOST:
                self.known.clear()
            data.flags.writeable = False
            self.known[key] = tensor


def _unwrap_by_type(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    core = tl.core
    stays: dict[type, bool] = {}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        if kind not in stays:
            stays[kind] = not issubclass(kind, (list, tuple, core.tuple, core.constexpr))
        return value if stays[kind] else unwrap(value)

    return unwrapped


def _compare_types_by_object() -> None:
    compare = tl.dtype.__eq__
    tl.dtype.__eq__ = lambda one, other: one is other or compare(one, other)


def _describe_blocks_once() -> None:
    core = tl.core
    describe = core.block_type.__init__
    known: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        """Does the same as `block_type.__init__`."""
        key = element_ty.name, tuple(core._unwrap_shape(shape))
        if key not in known:
            describe(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key])

    core.block_type.__init__ = init


def _make_handles_at_once() -> None:
    handle, pointer = interpreter.TensorHandle, tl.pointer_type
    check = handle.__post_init__

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        """Does the same as `TensorHandle.__init__`."""
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if type(dtype) is not pointer and data.itemsize * 8 > dtype.primitive_bitwidth:
            check(self)

    handle.__init__ = init


def broadcast_by_shape(block_of: Callable[[Any, Any], Any]) -> None:
    """Derives the common shape of two shapes only once. Equal shapes of tensors are one object."""
    semantic = TritonSemantic
    broadcast_others = semantic.broadcast_impl_value
    # The two shapes, which keep their place in memory, the common shape, and which of the two differ from it.
    plans: dict[tuple[int, int], tuple[Any, Any, tuple[int, ...], bool, bool]] = {}

    def reshaped(self: Any, tensor: Any, sizes: tuple[int, ...]) -> Any:
        return self.make_tensor(self.builder.create_broadcast(tensor.handle, sizes), block_of(tensor.dtype, sizes))

    def broadcast(self: Any, one: Any, other: Any) -> Any:
        if one.shape is other.shape:
            return one, other
        key = id(one.shape), id(other.shape)
        if key in plans:
            _, _, sizes, first, second = plans[key]
            return (
                reshaped(self, one, sizes) if first else one,
                reshaped(self, other, sizes) if second else other,
            )
        made = broadcast_others(self, one, other)
        if len(one.shape) == len(other.shape):
            sizes = made[0].type.shape
            plans[key] = one.shape, other.shape, sizes, made[0] is not one, made[1] is not other
        return made

    semantic.broadcast_impl_value = broadcast


def called_by_interpreter(member: Any) -> Callable[..., Any]:
    """Returns the replacement of a builtin during a launch: the same function, given the interpreter's semantics."""
    function = member.__wrapped__ if member.__code__ is _WRAPPER else member
    given = interpreter.interpreter_semantic

    def call(*args: Any, **named: Any) -> Any:
        named["_semantic"] = given
        return function(*args, **named)

    return call
