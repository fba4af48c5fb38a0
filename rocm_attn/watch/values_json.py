"""Values of the runtime to JSON and back, by the types of their fields, for the dumps of flight recorders."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

_KIND = "kind"


def as_json(value: Any) -> Any:
    """A value with dataclasses as objects, members of enums and dtypes by their names, and sequences as lists."""
    if dataclasses.is_dataclass(value):
        return {each.name: _field_as_json(each, getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return [as_json(each) for each in value] if isinstance(value, list | tuple) else value


def _field_as_json(field: dataclasses.Field[Any], value: Any) -> Any:
    """A field's value. If it may be of several classes, the object names its own."""
    several = "|" in str(field.type) and dataclasses.is_dataclass(value)
    return {_KIND: type(value).__name__, **as_json(value)} if several else as_json(value)


def from_json(form: Any, value: Any) -> Any:
    """The value of a type. Raises KeyError, TypeError, AttributeError, and what the type refuses."""
    if isinstance(value, Mapping):
        if get_origin(form) in (Union, types.UnionType):
            form = {each.__name__: each for each in get_args(form)}[value[_KIND]]
            value = {name: each for name, each in value.items() if name != _KIND}
        forms = get_type_hints(form)
        return form(**{name: from_json(forms.get(name), each) for name, each in value.items()})
    if isinstance(value, list):
        of_each = get_args(form)[0]
        return tuple(from_json(of_each, each) for each in value)
    if form is torch.dtype:
        return getattr(torch, value)
    return form[value] if isinstance(form, enum.EnumMeta) else value
