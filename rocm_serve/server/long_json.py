"""The JSON of long answers, item by item: one call for all of it would hold every other thread up for seconds."""

import json
from collections.abc import Iterator

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
# Choices are a list, and the logprobs of a choice lists in it, whose items are short.
_LISTS = 2


def long_json(value: object) -> bytes:
    """Returns a value as JSON. An iterator is written as a list of its items, which are made one by one, and short."""
    return b"".join(_parts(value, _LISTS))


def _parts(value: object, lists: int) -> Iterator[bytes]:
    """lists: levels of lists whose items may be long"""
    if lists and isinstance(value, dict):
        yield b"{"
        for number, (name, each) in enumerate(value.items()):
            yield f"{',' if number else ''}{_encode(name)}:".encode()
            yield from _parts(each, lists)
        yield b"}"
    elif isinstance(value, Iterator) or (lists and isinstance(value, list)):
        lists = 0 if isinstance(value, Iterator) else lists - 1
        yield b"["
        for number, each in enumerate(value):
            if number:
                yield b","
            yield from _parts(each, lists)
        yield b"]"
    else:
        yield _encode(value).encode()
