"""Doors: the public callables through which a caller reaches pages, rows, states or graphs, found while testers run.

Which there are is read from live objects: the classes of what a caller holds, and of what their docstrings and
properties lead to, as far as an object of the class holds on to a tensor that steps read (by a walk over what it refers
to). Which of them a tester calls is noted by a tracer, that looks at every call into the package from outside of it.
"""

import contextlib
import dataclasses
import enum
import functools
import gc
import importlib
import inspect
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

import rocm_attn
from tests.amd.house import interface

_PACKAGE = Path(rocm_attn.__file__).resolve().parent
# Symlinks lead out of the package to the two lower floors, and a frame names either path.
PROJECT = tuple(
    f"{folder}/" for folder in {str(_PACKAGE), *(str(_PACKAGE.parent / n) for n in ("kernels", "hip_graphs"))}
)

# Attributes that a docstring names: at the beginning of a line, or after another one's sentence.
_NAMED = re.compile(r"(?:^|; )[ ]*((?:\w+, )*\w+):\s", re.MULTILINE)
_MOST_OBJECTS = 200_000
_NAMED_VALUES: dict[str, Any] = {
    name.rpartition(".")[2]: attrgetter(name)(importlib.import_module(module.partition(".")[0]))
    for names in interface.groups().values()
    for name, module in names.items()
}


def doors_of(cls: type) -> dict[str, list[CodeType]]:
    """Public methods and properties of a class of the package, by the class that writes them, with their code."""
    found: dict[str, list[CodeType]] = {}
    for name in dir(cls):
        its = next((each for each in cls.__mro__ if name in vars(each)), None)
        if name.startswith("_") or its is None or not is_ours(its):
            continue
        codes = list(_codes(vars(its)[name]))
        if codes:
            found[f"{its.__name__}.{name}"] = codes
    return found


def is_ours(cls: type) -> bool:
    """True if a class is the package's own."""
    return cls.__module__.split(".")[0] in ("rocm_attn", "rocm_serve", "hip_graphs")


def _codes(member: Any) -> Iterator[CodeType]:
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    if isinstance(member, functools.cached_property):
        member = member.func
    each = [member.fget, member.fset] if isinstance(member, property) else [member]
    for one in each:
        one = inspect.unwrap(one) if callable(one) else one
        if isinstance(one, FunctionType) and one.__code__.co_filename != "<string>":
            yield one.__code__


def public_classes(roots: Iterable[object], storages: set[int]) -> dict[type, bool]:
    """Returns the classes that a caller reaches from these objects, and whether an object of each reaches storage.

    A caller reaches the objects to which an object of a stable name refers, and none beyond them.
    """
    found: dict[type, bool] = {}
    stable = {value for value in _NAMED_VALUES.values() if isinstance(value, type)}
    waiting, seen = list(roots), set[int]()
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, (tuple, list)):
            waiting += thing[:4]
            continue
        cls = type(thing)
        if id(thing) in seen or not is_ours(cls) or isinstance(thing, enum.Enum):
            continue
        seen.add(id(thing))
        if not found.get(cls):
            found[cls] = cls in classes_with_behaviour() or reaches(thing, storages)
        if cls not in stable:
            continue
        for name in sorted(_public_attributes(thing)):
            # Some are refused where there is nothing yet.
            with contextlib.suppress(Exception):
                waiting.append(getattr(thing, name))
    return found


def _public_attributes(thing: object) -> set[str]:
    """Fields, properties, and what the class says that its objects have."""
    cls = type(thing)
    names = {name for each in cls.__mro__ for name, value in vars(each).items() if isinstance(value, property)}
    if dataclasses.is_dataclass(thing):
        names |= {field.name for field in dataclasses.fields(thing)}
    for group in _NAMED.findall(cls.__doc__ or ""):
        names |= {name for name in group.split(", ") if hasattr(thing, name)}
    return {name for name in names if not name.startswith("_")}


def reaches(thing: object, storages: set[int]) -> bool:
    """True if an object refers, through any number of objects, to a tensor over one of these storages."""
    waiting, seen = [thing], {id(thing)}
    while waiting and len(seen) < _MOST_OBJECTS:
        one = waiting.pop()
        if isinstance(one, (Tensor, np.ndarray)):
            if storage_of(one) in storages:
                return True
            continue
        for other in _referents(one):
            if id(other) not in seen:
                seen.add(id(other))
                waiting.append(other)
    return False


def _referents(thing: object) -> Iterable[object]:
    if isinstance(thing, FunctionType):
        return [cell.cell_contents for cell in thing.__closure__ or ()]
    if isinstance(thing, (type, ModuleType, FrameType, CodeType, BuiltinFunctionType, threading.Thread)):
        return ()
    if isinstance(thing, MethodType):
        return thing.__self__, thing.__func__
    return gc.get_referents(thing)


def storage_of(tensor: Tensor | np.ndarray) -> int:
    """The address of what a tensor or an array lies in."""
    if isinstance(tensor, np.ndarray):
        return int(tensor.__array_interface__["data"][0])
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


class Tracer:
    """Notes which doors are called from outside of the package. called: their names"""

    def __init__(self, doors: dict[str, list[CodeType]]) -> None:
        self._names = {code: name for name, codes in doors.items() for code in codes}
        self.called: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the block runs, in its thread and in those that it starts."""
        sys.settrace(self._note)
        threading.settrace(self._note)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        # Nothing is returned: no line of the call is traced.
        if event == "call" and frame.f_code in self._names and _comes_from_outside(frame):
            self.called.add(self._names[frame.f_code])


def _comes_from_outside(frame: FrameType) -> bool:
    """True if the nearest frame of the package or of its tester below this one is the tester's."""
    below = frame.f_back
    while below is not None:
        path = below.f_code.co_filename
        if path.startswith(PROJECT):
            return False
        if "/tests/amd/" in path or "/rocm_lab/" in path:
            return True
        below = below.f_back
    return False


def public_functions() -> dict[str, list[CodeType]]:
    """The functions among the stable names, with their code."""
    return {
        name: [inspect.unwrap(value).__code__] for name, value in _NAMED_VALUES.items() if inspect.isfunction(value)
    }


@functools.cache
def classes_with_behaviour() -> set[type]:
    """The classes among the stable names that are no values, no protocols and no errors: they may hold on to pages."""
    found = set()
    for value in _NAMED_VALUES.values():
        if not isinstance(value, type) or issubclass(value, (tuple, enum.Enum, BaseException)):
            continue
        if not dataclasses.is_dataclass(value) and not getattr(value, "_is_protocol", False):
            found.add(value)
    return found
