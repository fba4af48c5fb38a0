"""Kept: keeps objects made for rounds of some size, for the next series of that size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

# Sizes of series that one engine may change between without making anything anew.
_MOST_KEPT = 8
# Graphs of a step's rounds kept per size: texts reach other buckets of lengths, and come back.
MOST_BUCKETS = 2
# Joined graphs of everything kept, including those of drafts: the driver's memory for each is separate.
MOST_GRAPHS = _MOST_KEPT * (MOST_BUCKETS + 1)


class SealedCache(Generic[Key, Value]):
    """Key -> the value made under one seal; if there are too many, the oldest are forgotten."""

    def __init__(self) -> None:
        self._values: dict[Key, Value] = {}
        self._seal_number = 0

    def of(self, seal_number: int) -> Mapping[Key, Value]:
        """All values made under this seal. Others are forgotten, because the tensors they read have moved."""
        if seal_number != self._seal_number:
            self._values.clear()
            self._seal_number = seal_number
        return self._values

    def put(self, key: Key, value: Value) -> Value:
        """Keeps a value, and returns it."""
        while len(self._values) >= _MOST_KEPT and key not in self._values:
            del self._values[next(iter(self._values))]
        self._values[key] = value
        return value
