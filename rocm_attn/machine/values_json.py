"""Values to JSON and back, by the types of their fields: dumps of flight recorders, passports, rows of tiles."""

import dataclasses
import enum
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from rocm_attn.errors import BadSetting, RocmAttnError

_KIND = "kind"


def as_json(value: Any) -> Any:
    """A value with dataclasses as objects, members of enums and dtypes by their names, and sequences as lists."""
    if dataclasses.is_dataclass(value):
        own = (each for each in dataclasses.fields(value) if each.init)
        return {each.name: _field_as_json(each, getattr(value, each.name)) for each in own}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return [as_json(each) for each in value] if isinstance(value, list | tuple) else value


def _field_as_json(field: dataclasses.Field[Any], value: Any) -> Any:
    """A field's value. If it may be of several classes, the object names its own."""
    several = len({*str(field.type).split(" | ")} - {"None"}) > 1 and dataclasses.is_dataclass(value)
    return {_KIND: type(value).__name__, **as_json(value)} if several else as_json(value)


def from_json(form: Any, value: Any, name: str) -> Any:
    """The value of a type that as_json() wrote.

    name: of the value, for errors
    Raises BadSetting if the value is not one of the type; it names the field that is wrong.
    """
    origin = get_origin(form)
    if origin in (Union, types.UnionType):
        return _one_of(get_args(form), value, name)
    if dataclasses.is_dataclass(form):
        return _fields(form, value, name)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        _require(isinstance(value, list), name, value, "a list")
        return tuple(from_json(get_args(form)[0], each, f"{name}[{index}]") for index, each in enumerate(value))
    if isinstance(form, enum.EnumMeta):
        _require(
            isinstance(value, str) and value in form.__members__, name, value, f"one of {', '.join(form.__members__)}"
        )
        return form[value]
    if form is torch.dtype:
        found = getattr(torch, value, None) if isinstance(value, str) else None
        _require(isinstance(found, torch.dtype), name, value, "a dtype of torch")
        return found
    if form is float:
        _require(type(value) in (int, float) and abs(value) <= sys.float_info.max, name, value, "a finite number")
        return float(value)
    _require(type(value) is form, name, value, f"of type {form.__name__}")
    return value


def _fields(form: Any, value: Any, name: str) -> Any:
    """A dataclass from the object of its fields. Raises BadSetting."""
    _require(isinstance(value, Mapping), name, value, f"an object with the fields of {form.__name__}")
    hints = get_type_hints(form)
    forms = {each.name: hints[each.name] for each in dataclasses.fields(form) if each.init}
    if others := sorted(value.keys() ^ forms.keys()):
        has = "is missing" if others[0] in forms else f"is no field of {form.__name__}"
        raise BadSetting(f"{name}.{others[0]} {has}")
    fields = {each: from_json(forms[each], value[each], f"{name}.{each}") for each in forms}
    try:
        return form(**fields)
    except RocmAttnError as error:
        raise BadSetting(f"{name}: {error}") from error


def _one_of(forms: tuple[Any, ...], value: Any, name: str) -> Any:
    """A value of one of several types: None, or an object that names its class. Raises BadSetting."""
    if value is None and types.NoneType in forms:
        return None
    forms = tuple(form for form in forms if form is not types.NoneType)
    if len(forms) == 1:
        return from_json(forms[0], value, name)
    by_name = {form.__name__: form for form in forms}
    kind = value.get(_KIND) if isinstance(value, Mapping) else None
    _require(
        isinstance(kind, str) and kind in by_name, name, value, f"an object whose kind is one of {', '.join(by_name)}"
    )
    return from_json(by_name[kind], {each: field for each, field in value.items() if each != _KIND}, name)


def _require(holds: bool, name: str, value: Any, what: str) -> None:
    if not holds:
        raise BadSetting(f"{name} is {value!r:.80}; it must be {what}")
