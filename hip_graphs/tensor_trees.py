"""Trees of tensors, as arguments and results may be: nested lists, tuples, dicts and dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
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
    elif _is_dataclass(tree):
        for _, branch in branches_of(tree):
            yield from tensors_in(branch)


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same tree with every tensor changed; what has no branches_of() is passed on as it is."""
    if isinstance(tree, Tensor):
        return change(tree)
    if is_tree(tree):
        return with_branches(tree, [map_tensors(change, branch) for _, branch in branches_of(tree)])
    return tree


def is_tree(value: Any) -> bool:
    """Whether a value is a plain list, tuple or dict, a named tuple or a dataclass: what can be made anew of others."""
    return type(value) in (list, tuple, dict) or _is_named_tuple(value) or _is_dataclass(value)


def branches_of(tree: Any) -> Iterable[tuple[str, Any]]:
    """(what is written after the tree's name to reach it, branch) for each branch, in order. tree: is_tree()"""
    if type(tree) is dict:
        return [(f"[{name!r}]", branch) for name, branch in tree.items()]
    if type(tree) in (list, tuple):
        return [(f"[{place}]", branch) for place, branch in enumerate(tree)]
    names = tree._fields if _is_named_tuple(tree) else [field.name for field in fields(tree) if field.init]
    return [(f".{name}", getattr(tree, name)) for name in names]


def with_branches(tree: Any, branches: Iterable[Any]) -> Any:
    """A tree of the same kind with these branches, in the order of branches_of()."""
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
