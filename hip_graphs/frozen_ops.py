"""The repetition of one recorded operation: a closure over fixed tensors and scalars that writes to the same memory.

Most operations have an out= form in the backend itself, which runs the same kernel as the functional form; the others
run functionally and are copied into place. Either way the result is bitwise that of the eager operation.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from rocm_attn.hip_graphs.collectives import is_collective, run_and_wait
from rocm_attn.hip_graphs.tensor_trees import tensors_in

aten = torch.ops.aten

Replayed = Callable[[], object]

_UNINITIALISED = frozenset({aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided})

_COPIES = frozenset({aten.clone, aten._to_copy})
_ZEROS = frozenset({aten.zeros, aten.zeros_like, aten.new_zeros})
_ONES = frozenset({aten.ones, aten.ones_like, aten.new_ones})

# Their out= forms write past their results or mix them up, in a pool: the one resizes a mean or a sum to all elements,
# the other takes results of one storage for the same memory.
_WITHOUT_OUT = frozenset({aten.binary_cross_entropy, aten.linalg_qr})

# The same operation through torch's own argument parser, which costs half as much as the generic call.
_QUICK_CALL: Mapping[OpOverload, Callable[..., object]] = {
    aten.add.out: torch.add,
    aten.addmm.out: torch.addmm,
    aten.bmm.out: torch.bmm,
    aten.cat.out: torch.cat,
    aten.index_select.out: torch.index_select,
    aten.mean.out: torch.mean,
    aten.mm.out: torch.mm,
    aten.mul.out: torch.mul,
    aten.neg.out: torch.neg,
    aten.pow.Tensor_Scalar_out: torch.pow,
    aten.rsqrt.out: torch.rsqrt,
    aten.sub.out: torch.sub,
}


@cache
def writes_into_arguments(func: OpOverload) -> bool:
    """True if func writes into one of its argument tensors (in-place and out= operations, collectives)."""
    return is_collective(func) or any(
        argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments
    )


def leaves_values(func: OpOverload) -> bool:
    """True if func gives values to its results.

    torch.empty() and its like do so only if torch is set to fill unwritten memory, which tests do to find reads of it.
    """
    filled = torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return filled or func.overloadpacket not in _UNINITIALISED


def frozen_op(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], homes: Sequence[Tensor | None]
) -> Replayed:
    """Returns a closure that computes func(*args, **kwargs) again and leaves each result in its home.

    homes: for every tensor that func returns, in order, the tensor of the same layout that receives its value; None for
    a result that shares memory with an argument, which is in place already.
    """
    written = [home for home in homes if home is not None]
    if is_collective(func):
        return partial(_communicate, func, args, kwargs, tuple(homes))
    if func is aten.copy_.default:
        return partial(args[0].copy_, args[1])
    if not written:
        return partial(func, *args, **kwargs)
    packet = func.overloadpacket
    if packet in _COPIES:
        return partial(written[0].copy_, args[0])
    if packet in _ZEROS:
        return written[0].zero_
    if packet in _ONES:
        return partial(written[0].fill_, 1)
    out_form = None if packet in _WITHOUT_OUT else _out_form(func)
    if out_form is not None and len(written) == len(homes):
        out = dict(zip(_out_names(out_form), written, strict=True))
        return partial(_QUICK_CALL.get(out_form, out_form), *args, **kwargs, **out)
    return partial(_run_and_copy, func, args, kwargs, tuple(homes))


def _communicate(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], homes: Sequence[Tensor | None]
) -> None:
    _copy_home(run_and_wait(func, args, kwargs), homes)


def _run_and_copy(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], homes: Sequence[Tensor | None]
) -> None:
    _copy_home(func(*args, **kwargs), homes)


def _copy_home(results: Any, homes: Sequence[Tensor | None]) -> None:
    for home, result in zip(homes, tensors_in(results), strict=True):
        if home is not None:
            home.copy_(result)


@cache
def _out_form(func: OpOverload) -> OpOverload | None:
    """Returns the overload of func that writes into given tensors, if the CPU has a separate kernel for it.

    Generated out= forms run the functional one and copy, which happens without them too.
    """
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        form: OpOverload = getattr(func.overloadpacket, name)
        arguments = form._schema.arguments
        inputs = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
        if (
            inputs == wanted
            and len(arguments) - len(inputs) == len(func._schema.returns)
            and form.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU)
        ):
            return form
    return None


@cache
def _out_names(form: OpOverload) -> list[str]:
    return [argument.name for argument in form._schema.arguments if argument.is_out]
