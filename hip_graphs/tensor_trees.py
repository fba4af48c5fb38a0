"""Trees of tensors, as in arguments and results: nested lists, tuples, dicts and dataclasses."""

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

# The most frequent arguments of operations other than tensors, which speeds up the check of every recorded operation.
_LEAVES = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout})


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in order."""
    found: list[Tensor] = []
    _add_tensors(tree, found)
    return found


def _add_tensors(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, (list, tuple)):
        for branch in tree:
            # Without a call for the branches that operations have most.
            if type(branch) is Tensor:
                found.append(branch)
            elif type(branch) not in _LEAVES:
                _add_tensors(branch, found)
    elif type(tree) in _LEAVES:
        return
    elif isinstance(tree, dict):
        for branch in tree.values():
            _add_tensors(branch, found)
    elif _is_dataclass(tree):
        for _, branch in branches_of(tree):
            _add_tensors(branch, found)


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Returns the same tree with every tensor changed; values without branches_of() are passed on unchanged."""
    if isinstance(tree, Tensor):
        return change(tree)
    if type(tree) in _LEAVES:
        return tree
    if type(tree) in (list, tuple):  # the case of operations' arguments: without the names that branches_of() makes
        return type(tree)([map_tensors(change, branch) for branch in tree])
    if type(tree) is dict:
        return {name: map_tensors(change, branch) for name, branch in tree.items()}
    if is_tree(tree):
        return with_branches(tree, [map_tensors(change, branch) for _, branch in branches_of(tree)])
    return tree


def is_tree(value: Any) -> bool:
    """True if a value is a plain list, tuple or dict, a named tuple or a dataclass, which can be rebuilt."""
    return type(value) in (list, tuple, dict) or _is_named_tuple(value) or _is_dataclass(value)


def branches_of(tree: Any) -> Iterable[tuple[str, Any]]:
    """Yields (the text after the tree's name that reaches it, branch) for each branch, in order. tree: is_tree()"""
    if type(tree) is dict:
        return [(f"[{name!r}]", branch) for name, branch in tree.items()]
    if type(tree) in (list, tuple):
        return [(f"[{place}]", branch) for place, branch in enumerate(tree)]
    names = tree._fields if _is_named_tuple(tree) else [field.name for field in fields(tree) if field.init]
    return [(f".{name}", getattr(tree, name)) for name in names]


def with_branches(tree: Any, branches: Iterable[Any]) -> Any:
    """Returns a tree of the same kind with these branches, in the order of branches_of()."""
    if type(tree) is dict:
        return dict(zip(tree, branches, strict=True))
    if type(tree) in (list, tuple):
        return type(tree)(branches)
    if _is_named_tuple(tree):
        return type(tree)._make(branches)
    names = (field.name for field in fields(tree) if field.init)
    return replace(tree, **dict(zip(names, branches, strict=True)))


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(type(value), "_make")


def _is_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)
