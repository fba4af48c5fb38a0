"""Collectives among recorded operations: what they write, and that their results must be waited for.

Their schemas say neither: c10d's name no argument that they write into, and give a Work to wait for beside the tensors;
those of functional collectives give tensors that are complete after wait_tensor() alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from rocm_attn.hip_graphs.tensor_trees import map_tensors

_WITH_WORK = "c10d"
_FUNCTIONAL = "_c10d_functional"


def is_collective(func: OpOverload) -> bool:
    """Whether func moves data between ranks; all of a group's ranks must do it equally often."""
    return func.namespace in (_WITH_WORK, _FUNCTIONAL)


def gives_promises(func: OpOverload) -> bool:
    """Whether func is a collective whose results are complete after wait_tensor() alone."""
    return func.namespace == _FUNCTIONAL


def is_wait(func: OpOverload) -> bool:
    """Whether func only waits for an earlier collective."""
    return func.namespace == _FUNCTIONAL and func.name().startswith(f"{_FUNCTIONAL}::wait_tensor")  # type: ignore[no-untyped-call]


def run_and_wait(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """func(*args, **kwargs) of a collective; what it returns is complete."""
    result = func(*args, **kwargs)
    if gives_promises(func):
        return result if is_wait(func) else map_tensors(torch.ops._c10d_functional.wait_tensor, result)
    for part in result if isinstance(result, tuple) else (result,):
        if not isinstance(part, Tensor) and hasattr(part, "wait"):
            part.wait()
    return result


def unwraps_itself(types: Iterable[type]) -> bool:
    """Whether an operation's arguments are tensors of a type that does the operation on other tensors, such as those
    that wait for a functional collective when they are first used."""
    return any(issubclass(kind, Tensor) and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types)


def waited_for(tensor: Tensor) -> Tensor:
    """The tensor itself, or what a functional collective's promise of one comes to."""
    wait = getattr(tensor, "trigger_wait", None)
    waited: Tensor = tensor if wait is None else wait()
    return waited
