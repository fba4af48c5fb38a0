"""The arguments of a launch, whatever they are made of: each of their tensors is placed in memory, copied, compared."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import PoolKind
from tests.amd.mutation.memory import Memory

T = TypeVar("T")


def placed(memory: Memory, value: T) -> T:
    """Returns value with its tensors in memory."""
    copy: T = with_tensors(memory.put, value)
    return copy


def with_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Returns value with each of its tensors that has elements changed: in tuples, lists, dicts, dataclasses, pages."""
    if isinstance(value, Tensor):
        return change(value) if value.numel() else value
    if isinstance(value, dict):
        return {name: with_tensors(change, each) for name, each in value.items()}
    if isinstance(value, LayerPages):
        return _pages_with_tensors(change, value)
    if isinstance(value, list | tuple):
        made = [with_tensors(change, each) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if is_dataclass(value) and not isinstance(value, type):
        given = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        return replace(value, **with_tensors(change, given))
    return value


def _pages_with_tensors(change: Callable[[Tensor], Tensor], pages: LayerPages) -> LayerPages:
    """The memory of pages is changed, which need not support eight-bit dtypes; V of latent pages stays part of K."""
    form, dtype = pages.format, pages.k.dtype
    scales = [None if scale is None else change(scale) for scale in (pages.k_scale, pages.v_scale)]
    if form.kind is PoolKind.LATENT:
        return LayerPages.latent(change(pages.lines[0].flatten(1)).view(dtype), form, scales[0])
    return LayerPages(change(pages.raw_k).view(dtype), change(pages.raw_v).view(dtype), form, *scales)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yields the tensors that with_tensors() changes."""
    found: list[Tensor] = []
    with_tensors(lambda tensor: found.append(tensor) or tensor, value)  # type: ignore[func-returns-value]
    yield from found


def run_both(
    memory: Memory, launch: Callable[..., None], twin: Callable[..., None], *args: Any, **options: Any
) -> tuple[Any, Any]:
    """Runs a launcher over arguments in memory, and its torch twin over copies. Returns the arguments of both."""
    found, wanted = ((with_tensors(put, args), with_tensors(put, options)) for put in (memory.put, torch.clone))
    launch(*found[0], **found[1])
    twin(*wanted[0], **wanted[1])
    return found, wanted


def assert_same(
    memory: Memory,
    launch: Callable[..., None],
    twin: Callable[..., None],
    *args: Any,
    near: float = 0.0,
    **options: Any,
) -> None:
    """Checks that a launcher, in memory, leaves the same in its arguments as its torch twin, and nothing else.

    near: by how much floats may differ, where a kernel and its twin add up in other orders
    """
    for got, want in zip(*map(tensors_of, run_both(memory, launch, twin, *args, **options)), strict=True):
        if near and got.is_floating_point():
            torch.testing.assert_close(got, want, rtol=0, atol=near, equal_nan=True)
        else:
            assert torch.equal(got, want), f"{got.tolist()} instead of {want.tolist()}"
