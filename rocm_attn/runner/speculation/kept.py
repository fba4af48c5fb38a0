"""Kept: what was made for rounds of some size, for the next series of that size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

# Sizes of series that one engine may change between without making anything anew.
_MOST_KEPT = 8
# Graphs of a step's rounds that are kept of one size: texts come to other buckets of lengths, and back.
MOST_BUCKETS = 2
# Joined graphs of all that is kept, those of drafts among them: what the driver keeps of each is its own.
MOST_GRAPHS = _MOST_KEPT * (MOST_BUCKETS + 1)


class Kept(Generic[Key, Value]):
    """Key -> what was made under one seal; the oldest ones are forgotten where there are too many."""

    def __init__(self) -> None:
        self._values: dict[Key, Value] = {}
        self._seal_number = 0

    def of(self, seal_number: int) -> Mapping[Key, Value]:
        """All that were made under this seal. Others are forgotten: what they read lies elsewhere now."""
        if seal_number != self._seal_number:
            self._values.clear()
            self._seal_number = seal_number
        return self._values

    def put(self, key: Key, value: Value) -> Value:
        """Keep a value, which is given back."""
        while len(self._values) >= _MOST_KEPT and key not in self._values:
            del self._values[next(iter(self._values))]
        self._values[key] = value
        return value
