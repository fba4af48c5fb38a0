"""Launches of Triton kernels, noted with the memory that they find: for a layer that is run again after it was wrong.

Every launch of Triton's is noted, of our kernels and of others. Constants are written in plain values, so that another
process can read them.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction, KernelInterface

from rocm_attn.kernels.launch import Thunk, observe_launches


@dataclass(frozen=True, slots=True, eq=False)
class NotedLaunch:
    """A launch that was made.

    kernel:    the jitted function
    compiled:  its variant that ran
    arguments: by name, constants included
    options:   of the launch, such as num_warps
    memory:    address of a storage -> its bytes before the launch
    """

    kernel: Any
    compiled: Any
    grid: tuple[int, int, int]
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]
    memory: Mapping[int, Tensor]


class NotedLaunches:
    """The launches that a thread makes while noting() is active, in order.

    stays: true for a tensor that no launch changes, and whose memory is not copied
    """

    def __init__(self, stays: Callable[[Tensor], bool]) -> None:
        self.launches: list[NotedLaunch] = []
        self._stays = stays

    @contextmanager
    def noting(self) -> Iterator[None]:
        """While active, launches of this thread are made in the ordinary way, and noted."""
        run, thread = JITFunction.run, get_ident()

        def noted(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> Any:
            if warmup or get_ident() != thread:
                return run(kernel, *args, grid=grid, warmup=warmup, **given)
            defaults = {each.name: each.default for each in kernel.params if each.has_default}
            named = {**defaults, **dict(zip(kernel.arg_names, args, strict=False))}
            named |= {name: value for name, value in given.items() if name in kernel.arg_names}
            memory = self._memory_of(named.values())
            compiled = run(kernel, *args, grid=grid, warmup=warmup, **given)
            x, y, z = (*(grid(named) if callable(grid) else grid), 1, 1)[:3]
            options = {name: value for name, value in given.items() if name not in named}
            self.launches.append(NotedLaunch(kernel, compiled, (x, y, z), named, options, memory))
            return compiled

        JITFunction.run = noted
        try:
            # When observed, launches take Triton's own path.
            with observe_launches(_run):
                yield
        finally:
            JITFunction.run = run

    def _memory_of(self, arguments: Iterable[Any]) -> dict[int, Tensor]:
        tensors = [each for each in arguments if isinstance(each, Tensor) and not self._stays(each)]
        storages = {each.untyped_storage().data_ptr(): each for each in tensors}
        return {address: bytes_of(each).clone() for address, each in storages.items()}


def _run(thunk: Thunk) -> None:
    thunk()


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's whole storage, uint8 [n], in the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def as_plain(value: Any) -> Any:
    """A constant of a kernel as numbers, strings, lists and dictionaries. Raises ValueError for any other."""
    value = value.value if isinstance(value, tl.constexpr) else value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        kind = type(value)
        return {"named": "" if kind is tuple else _name_of(kind), "values": [as_plain(each) for each in value]}
    if isinstance(value, tl.dtype):
        return {"dtype": str(value)}
    if isinstance(value, torch.dtype):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, JITFunction):
        return {"function": _name_of(value.fn)}
    raise ValueError(f"a constant of type {type(value).__name__} cannot be written down")


def of_plain(value: Any) -> Any:
    """The constant that as_plain() wrote.

    Raises ImportError and AttributeError, and ValueError for the name of something else.
    """
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        return tl.dtype(value["dtype"])
    if "torch" in value:
        return getattr(torch, value["torch"])
    if "function" in value:
        return kernel_named(value["function"])
    values = [of_plain(each) for each in value["values"]]
    if not value["named"]:
        return tuple(values)
    kind = _named(value["named"])
    # The name comes from a file, which must not choose what is called.
    if not (isinstance(kind, type) and issubclass(kind, tuple)):
        raise ValueError(f"{value['named']} is no named tuple, as a kernel's constant of parts is")
    return kind(*values)


def name_of(kernel: Any) -> str:
    """ "module:name" of a jitted function."""
    return _name_of(kernel.fn)


def kernel_named(name: str) -> Any:
    """The jitted function that name_of() named, imported.

    Raises ImportError and AttributeError, and ValueError for the name of something else.
    """
    found = _named(name)
    if not isinstance(found, KernelInterface):
        raise ValueError(f"{name} is no kernel of Triton's")
    return found


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _name_of(value: Any) -> str:
    return f"{value.__module__}:{value.__qualname__}"
