"""Reduces a launch of a compiled kernel to one call of the driver, with everything but a few values fixed.

In each launch Triton's launcher determines how much scratch memory the kernel takes and which hooks there are, and then
calls a function of the driver. That costs a third of a launch. The arguments of that function do not change with the
values of the kernel's arguments, so they are found out once: a copy of the launcher passes on places instead of values.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

Run = Callable[..., object]
# values, the fixed ones last -> the arguments of a function of the driver
Arguments = Callable[[tuple[object, ...]], tuple[object, ...]]

# address of a tensor -> the driver's argument for a descriptor of it
MapOf = Callable[[int], object]

# For one form of call: layers of a model, and tensors that moved.
_MOST_MAPS = 512

# The launcher does more than pass its arguments on if one of these is not 0.
_OTHER_WORK = ("global_scratch_size", "profile_scratch_size", "gsan_enabled")


@dataclass(frozen=True, slots=True)
class ArgumentPlace:
    """An argument that differs in each launch: the number of its value."""

    number: int


@dataclass(frozen=True, slots=True)
class DescribedPlace:
    """A descriptor of a tensor (TMA) whose address differs in each launch: the number of the address."""

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str


class _Described:
    """A descriptor from which Triton's driver makes a map, and its tensor, whose address the driver asks for."""

    def __init__(self, address: int, place: DescribedPlace) -> None:
        self._address = address
        self.base, self.shape, self.strides, self.padding = self, list(place.shape), list(place.strides), place.padding

    def data_ptr(self) -> int:
        return self._address


def with_maps(
    run: Run, template: tuple[object, ...], first: int
) -> tuple[Run, tuple[object, ...], list[tuple[int, MapOf]]] | None:
    """Returns the result of driver_call with maps instead of descriptors: a function, its arguments, and the maps.

    A descriptor is replaced by an ArgumentPlace for its map, numbered from `first` on, and by its shape and strides,
    number by number. Each of the maps is the number of an address and the function that makes its map. Returns None if
    Triton's launcher is not one of the known ones.
    """
    described = [each for each in template if isinstance(each, DescribedPlace)]
    nested = [each for inner in template if type(inner) is tuple for each in inner if isinstance(each, DescribedPlace)]
    if not described and not nested:
        return run, template, []
    code, cells = getattr(run, "__code__", None), getattr(run, "__closure__", None) or ()
    within = {name: cell.cell_contents for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=False)}
    launcher, metadata = within.get("launcher"), within.get("tensordesc_meta")
    if nested or not callable(launcher) or not metadata or len(metadata) != len(described) or None in metadata:
        return None
    flat: list[object] = []
    maps: list[tuple[int, MapOf]] = []
    for each in template:
        if isinstance(each, DescribedPlace):
            flat += [ArgumentPlace(first + len(maps)), *each.shape, *each.strides]
            maps.append((each.number, _map_of(each, metadata[len(maps)])))
        else:
            flat.append(each)
    return launcher, tuple(flat), maps


def _map_of(place: DescribedPlace, metadata: Any) -> MapOf:
    """Returns a function that makes maps by Triton's own function, and keeps those of a model's layers."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    @functools.lru_cache(_MOST_MAPS)
    def map_of(address: int) -> object:
        return make_tensordesc_arg(_Described(address, place), metadata)[0]

    return map_of


def driver_call(compiled: Any, grid: Sequence[object], stream: object, arguments: Iterable[object]) -> tuple[Run, Any]:
    """Returns a function, and the tuple of arguments that it is called with to launch a compiled kernel.

    grid, stream, arguments: values, or places, which stay at their positions, perhaps within a tuple of the tuple
    """
    # The call is that of compiled[grid], without looking for hooks of a profiler.
    handles = compiled.function, compiled.packed_metadata, None, None, None
    given = (*(*grid, 1, 1)[:3], stream, *handles, *arguments)
    launcher = compiled.run
    if not hasattr(launcher, "launch") or any(getattr(launcher, name, 0) for name in _OTHER_WORK):
        return launcher, given
    handed: list[tuple[object, ...]] = []
    stand_in = copy.copy(launcher)
    stand_in.launch = lambda *args: handed.append(args)
    stand_in(*given)
    return (launcher.launch, handed[0]) if len(handed) == 1 else (launcher, given)


def arguments_of(template: tuple[object, ...], num_values: int, constants: list[object]) -> Arguments:
    """Returns the function that puts values in the places of a template. constants: receives everything else.

    num_values: number of values that come before the constants
    """
    inner = [at for at, each in enumerate(template) if type(each) is tuple and any(map(_is_place, each))]
    if not inner:
        return _taken(template, num_values, constants)
    assert inner == [len(template) - 1], "a launcher hands a kernel's arguments over flat, or as its last argument"
    first, last = template[:-1], template[-1]
    assert isinstance(last, tuple)
    outer_of, inner_of = _taken(first, num_values, constants), _taken(last, num_values, constants)
    return lambda values: (*outer_of(values), inner_of(values))


def _is_place(argument: object) -> bool:
    return isinstance(argument, ArgumentPlace)


def _taken(template: tuple[object, ...], num_values: int, constants: list[object]) -> Arguments:
    taken = []
    for argument in template:
        if isinstance(argument, ArgumentPlace):
            taken.append(argument.number)
        else:
            taken.append(num_values + len(constants))
            constants.append(argument)
    # With one number itemgetter gives no tuple.
    return itemgetter(*taken) if len(taken) > 1 else lambda values: tuple(values[at] for at in taken)
