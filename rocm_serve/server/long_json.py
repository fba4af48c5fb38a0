"""The JSON of long answers, item by item: one call for all of it would hold every other thread up for seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
# Choices are a list, and the logprobs of a choice lists in it, whose items are short.
_LISTS = 2


def long_json(value: object, lists: int = _LISTS) -> str:
    """Returns a value as JSON. An iterator is written as a list of its items, which are made one by one and are short.

    lists: levels of lists whose items may be long
    """
    if lists and isinstance(value, dict):
        return "{" + ",".join([f"{_encode(name)}:{long_json(each, lists)}" for name, each in value.items()]) + "}"
    if lists and isinstance(value, list):
        return "[" + ",".join([long_json(each, lists - 1) for each in value]) + "]"
    if isinstance(value, Iterator):
        return "[" + ",".join(map(_encode, value)) + "]"
    return _encode(value)
