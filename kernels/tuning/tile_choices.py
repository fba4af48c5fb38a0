"""Tile choices, read from the JSON file of their family: an object on each line.

A field that a row leaves out has its class's default. "why" says why a row is as it is; nothing reads it.
"""

import enum
import functools
import json
import pkgutil
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar, get_args, get_type_hints

import torch

from rocm_attn.kernels.tuning.tiles import names_of

AnyChoice = TypeVar("AnyChoice")


class TableFile(Generic[AnyChoice]):
    """The rows of a table, read from its file when they are first gone through."""

    def __init__(self, kind: type[AnyChoice], file: str, table: str) -> None:
        self._kind, self._file, self._table = kind, file, table

    def __iter__(self) -> Iterator[AnyChoice]:
        return iter(self._choices)

    @functools.cached_property
    def _choices(self) -> tuple[AnyChoice, ...]:
        data = pkgutil.get_data(__name__.rpartition(".")[0], self._file)
        assert data is not None, "the loader of a package reads its files"
        return tuple(_value(self._kind, choice) for choice in json.loads(data)[self._table])


class _ArchChoice(Protocol):
    @property
    def arch(self) -> str: ...
    @property
    def item_bytes(self) -> int: ...


ArchChoice = TypeVar("ArchChoice", bound=_ArchChoice)


def choices_of(rows: TableFile[ArchChoice], arch: str, dtype: torch.dtype) -> Iterator[tuple[ArchChoice, ...]]:
    """The rows for an arch and elements of dtype's size, under each name of the arch, its own first."""
    return (_choices_of_name(rows, name, dtype.itemsize) for name in names_of(arch))


@functools.cache
def _choices_of_name(rows: TableFile[ArchChoice], name: str, item_bytes: int) -> tuple[ArchChoice, ...]:
    return tuple(choice for choice in rows if (choice.arch, choice.item_bytes) == (name, item_bytes))


def _value(kind: Any, given: Any) -> Any:
    """A value of JSON as one of a field's type: a class of fields, an enum's member by name, a tuple, or itself."""
    if hasattr(kind, "__dataclass_fields__"):
        types = _types_of(kind)
        return kind(**{name: _value(types[name], value) for name, value in given.items() if name != "why"})
    if isinstance(given, list):
        return tuple(_value(get_args(kind)[0], each) for each in given)
    if isinstance(given, dict):
        return _value(get_args(kind)[0], given)  # a class of fields, or None
    if issubclass(kind, enum.Enum):
        return kind[given]
    assert type(given) is kind, f"{given!r} is no {kind.__name__}"
    return given


@functools.cache
def _types_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
