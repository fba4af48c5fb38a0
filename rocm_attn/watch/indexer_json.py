"""The indexer of a problem to JSON and back, for the dumps of flight recorders."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rocm_attn.problem import (
    ALL_KEYS,
    AllKeys,
    EarlierSelection,
    Indexer,
    Indexing,
    KVEncoding,
    LastUnit,
    Pooling,
    Scales,
)

_KINDS = {kind.__name__: kind for kind in (AllKeys, Indexer, EarlierSelection)}
_OF_INDEXER = {"key_encoding": KVEncoding, "key_scales": Scales}
_OF_INDEXING = {"pooling": Pooling, "last_unit": LastUnit}


def indexer_as_json(indexer: AllKeys | Indexer | EarlierSelection) -> dict[str, Any]:
    """The indexer's kind and fields."""
    fields: dict[str, Any] = {"kind": type(indexer).__name__}
    if isinstance(indexer, AllKeys):
        return fields
    of_indexing = {**dataclasses.asdict(indexer.indexing), **_names(indexer.indexing, _OF_INDEXING)}
    if isinstance(indexer, Indexer):
        fields |= {**dataclasses.asdict(indexer), **_names(indexer, _OF_INDEXER)}
    return {**fields, "indexing": of_indexing}


def indexer_from_json(fields: Mapping[str, Any]) -> AllKeys | Indexer | EarlierSelection:
    """The indexer of these fields. Raises KeyError, TypeError, AttributeError, BadProblem."""
    kind = _KINDS[fields["kind"]]
    if kind is AllKeys:
        return ALL_KEYS
    rest = {name: value for name, value in fields.items() if name != "kind"}
    indexing = Indexing(**{**rest["indexing"], **_values(rest["indexing"], _OF_INDEXING)})
    if kind is EarlierSelection:
        return EarlierSelection(indexing)
    return Indexer(**{**rest, **_values(rest, _OF_INDEXER), "indexing": indexing})


def _names(value: Any, kinds: Mapping[str, Any]) -> dict[str, str]:
    return {name: getattr(value, name).name for name in kinds}


def _values(fields: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(kind, fields[name]) for name, kind in kinds.items()}
