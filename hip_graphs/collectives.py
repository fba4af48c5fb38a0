"""Collectives among recorded operations: the arguments that they write, and the wait that their results need.

Their schemas state neither: those of c10d name no argument that they write into, and return a Work to wait for in
addition to the tensors; those of functional collectives return tensors that are complete only after wait_tensor().
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from rocm_attn.hip_graphs.tensor_trees import map_tensors

_WITH_WORK = "c10d"
_FUNCTIONAL = "_c10d_functional"


def is_collective(func: OpOverload) -> bool:
    """True if func moves data between ranks; all of a group's ranks must do it equally often."""
    return func.namespace in (_WITH_WORK, _FUNCTIONAL)


def gives_promises(func: OpOverload) -> bool:
    """True if func is a collective whose results are complete only after wait_tensor()."""
    return func.namespace == _FUNCTIONAL


def is_wait(func: OpOverload) -> bool:
    """True if func only waits for an earlier collective."""
    return func.namespace == _FUNCTIONAL and func.name().startswith(f"{_FUNCTIONAL}::wait_tensor")  # type: ignore[no-untyped-call]


def run_and_wait(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a collective func(*args, **kwargs); its result is complete."""
    result = func(*args, **kwargs)
    if gives_promises(func):
        return result if is_wait(func) else map_tensors(torch.ops._c10d_functional.wait_tensor, result)
    for part in result if isinstance(result, tuple) else (result,):
        if not isinstance(part, Tensor) and hasattr(part, "wait"):
            part.wait()
    return result


def unwraps_itself(types: Iterable[type]) -> bool:
    """True if an argument's tensor type does the operation on other tensors.

    Tensors that wait for a functional collective when they are first used have such a type.
    """
    return any(issubclass(kind, Tensor) and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types)


def waited_for(tensor: Tensor) -> Tensor:
    """Returns the tensor, or the complete result if it is a pending one of a functional collective."""
    wait = getattr(tensor, "trigger_wait", None)
    waited: Tensor = tensor if wait is None else wait()
    return waited
