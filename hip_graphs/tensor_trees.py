"""Tensors inside the arguments and results of operations: nested lists, tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for branch in tree:
            yield from tensors_in(branch)
    elif isinstance(tree, dict):
        for branch in tree.values():
            yield from tensors_in(branch)


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same tree with every tensor changed; anything but a plain list, tuple or dict is passed on as it is."""
    if isinstance(tree, Tensor):
        return change(tree)
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(change, branch) for branch in tree)
    if type(tree) is dict:
        return {name: map_tensors(change, branch) for name, branch in tree.items()}
    return tree
