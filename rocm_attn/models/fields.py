"""Fields: a model's description (config.json, GGUF metadata) read with types. Bad values raise clear errors."""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from rocm_attn.errors import BadModel, Unsupported

# Every size and id of a model is an int32 on the device.
_LARGEST = 2**31 - 1
# Eighty times as many as the deepest published model; each costs a few kilobytes before a file is compared.
MAX_LAYERS = 10_000
# The index of a trillion parameters has a few megabytes. A config is read whole.
_MAX_TEXT_BYTES = 64 << 20
_REMEDY = "download the model's files again, or name another file"

_LONGEST = 160
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100


def shown(value: object) -> str:
    """A value from a file for a message: as Python writes it, shortened if it is long or deep."""
    text = _SHORT.repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping of named values from a file.

    values: name -> value in the file
    source: name of the file in messages, for instance "config.json"

    A value of None counts as absent. Every method raises BadModel that names the field, the value and the source.
    """

    values: Mapping[str, object]
    source: str

    def has(self, name: str) -> bool:
        """True if the file has a value under this name."""
        return self.values.get(name) is not None

    def count(self, name: str, default: int | None = None, most: int = _LARGEST, least: int = 1) -> int:
        """A whole number from least to most."""
        value = self.whole(name, default)
        if value < least:
            raise BadModel(f"{self.source}: {name} is {value}; it must be at least {least}")
        if value > most:
            raise BadModel(f"{self.source}: {name} is {value}; it must be at most {most}")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number that fits an int32."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadModel(f"{self.source}: {name} is {shown(value)}; it must be a whole number")
        if not -_LARGEST <= value <= _LARGEST:
            raise BadModel(f"{self.source}: {name} is {shown(value)}; it must be at most {_LARGEST}")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._get(name, default)
        # A float above all others, or a whole number that no float can hold, counts as infinite.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise BadModel(f"{self.source}: {name} is {shown(value)}; it must be a positive number")
        return float(value)

    def positives(self, name: str) -> tuple[float, ...]:
        """A list of numbers as positive() takes them."""
        return tuple(Fields({name: value}, self.source).positive(name) for value in self.list(name))

    def flag(self, name: str, default: bool | None = None) -> bool:
        """A bool. A null is refused if an absent one means true: other readers take it for false."""
        if default and self.values.get(name, default) is None:
            raise BadModel(f"{self.source}: {name} is null; it must be true or false")
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise BadModel(f"{self.source}: {name} is {shown(value)}; it must be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise BadModel(f"{self.source}: {name} is {shown(value)}; it must be a string")
        return value

    def list(self, name: str) -> list[object]:
        """A list of any values."""
        value = self._get(name, None)
        if not isinstance(value, list):
            raise BadModel(f"{self.source}: {name} is {shown(value)}; it must be a list")
        return value

    def layer_types(self, num_layers: int, served: Collection[str]) -> tuple[str, ...]:
        """[layers] The values of layer_types. Raises Unsupported if one is not served."""
        types = self.list("layer_types")
        if len(types) != num_layers:
            raise BadModel(f"{self.source}: {len(types)} layer_types for num_hidden_layers {num_layers}")
        if unknown := [each for each in types if each not in list(served)]:
            raise Unsupported(f"layer type {shown(unknown[0])} is not served; layer_types may hold {', '.join(served)}")
        return tuple(str(each) for each in types)

    def ids(self, name: str) -> tuple[int, ...]:
        """One id (of a token, a layer), a list of them, or none at all."""
        value = self.values.get(name)
        items = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= _LARGEST for item in items):
            raise BadModel(
                f"{self.source}: {name} is {shown(value)}; it must be an id or a list of them, each 0 to {_LARGEST}"
            )
        return tuple(items)

    def inner(self, name: str) -> Fields:
        """The fields of a nested object; no fields if it is absent."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise BadModel(f"{self.source}: {name} is {shown(value)}; it must be an object")
        return Fields(value, f"{self.source}: {name}")

    def _get(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            raise BadModel(f"{self.source} does not say {name}; the file is not complete")
        return default


def read_json(path: Path) -> Mapping[str, object]:
    """The object in a JSON file. Raises BadModel."""
    text = read_text(path)
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # an escaped half of a character is none
    except RecursionError as error:
        raise BadModel(f"{path} is not JSON of a model (it is nested too deeply); {_REMEDY}") from error
    except ValueError as error:
        raise BadModel(f"{path} is not JSON ({error}); {_REMEDY}") from error
    if not isinstance(value, dict):
        raise BadModel(f"{path} holds JSON that is no object, and a model's files hold one; {_REMEDY}")
    return value


def read_text(path: Path) -> str:
    """A file's text, UTF-8. Raises BadModel."""
    try:
        if path.stat().st_size > _MAX_TEXT_BYTES:
            raise BadModel(
                f"{path} has {path.stat().st_size} bytes; a model's text file may have up to {_MAX_TEXT_BYTES}"
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadModel(f"{path} cannot be read ({error})") from error
