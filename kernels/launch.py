"""The one place where a Triton kernel is launched, so that a recorder can see every launch.

A launched kernel takes flat parameters, and makes the values that its helpers take from them: a tuple as a launch
argument costs about 10 us of host time per eager decode launch, and 8.2 instead of 7.8 us for a graph of one sequence x
8k (H200, Triton 3.6). The values that it is compiled for are one NamedTuple of plain numbers, a constexpr.

An observed launch is passed to the observer as a thunk whose grid, scalars and tensors are fixed, and is not run here:
the observer decides. A recorder for machines without a GPU runs it and keeps it for replay.
"""

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from rocm_attn.kernels.driver_call import ArgumentPlace, Arguments, Run, arguments_of, driver_call

Thunk = Callable[[], object]
LaunchObserver = Callable[[Thunk], None]
Launcher = TypeVar("Launcher", bound=Callable[..., object])
Given = ParamSpec("Given")

# Set explicitly, because Triton's default changes: on up to 3.9, off from 3.10.
_OPTIONS = {"enable_fp_fusion": True}
_INT32_BYTES = 2**31

# Threads whose launches are observed: they go to the thread's last observer, and those of other threads to the device.
observers: dict[int, list[LaunchObserver]] = {}


class Launch(NamedTuple):
    """A launch that was made.

    kernel:    the jitted function
    compiled:  its variant that ran; None under the interpreter
    arguments: all arguments of the kernel, in order, constexpr ones included
    """

    kernel: Any
    compiled: Any
    grid: tuple[int, ...]
    arguments: tuple[object, ...]


@dataclass(slots=True)
class Notes:
    """The launches that a thread has made, in order; is_whole: whether these are all."""

    launches: list[Launch] = field(default_factory=list)
    is_whole: bool = True

    def add(self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: tuple[object, ...], options: Any) -> None:
        """Adds a launch that was made."""
        named = kernel.arg_names[len(args) :] if hasattr(kernel, "arg_names") else [None]
        if all(name in options for name in named):
            arguments = (*args, *(options[name] for name in named))
            self.launches.append(Launch(kernel, compiled, grid, arguments))
        else:
            self.is_whole = False


# By thread, for threads that note their launches.
_notes: dict[int, Notes] = {}

_only_launching: set[Callable[..., object]] = set()


@contextmanager
def note_launches() -> Iterator[Notes]:
    """While active, launches of this thread are made and noted. Must not be nested."""
    notes = _notes[get_ident()] = Notes()
    try:
        yield notes
    finally:
        del _notes[get_ident()]


def only_launches(launcher: Launcher) -> Launcher:
    """Declares that all of a function's work on the device is calls of launch()."""
    _only_launching.add(launcher)
    return launcher


def does_only_launch(function: Callable[..., object]) -> bool:
    """True if this function was declared so. A wrapper around it must be declared itself."""
    return function in _only_launching


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:
    """kernel[grid](*args, **options); an empty grid launches nothing."""
    if 0 in grid:
        return
    options = {**_OPTIONS, **options}
    if observers and (observer := _observer_here()):
        observer(partial(kernel[grid], *args, **options))
        return
    # Without parameters it is the interpreter's, or another library's function.
    compiled = _launched(kernel, grid, args, options) if hasattr(kernel, "params") else kernel[grid](*args, **options)
    if _notes:
        _note(kernel, compiled, grid, args, options)


def _launched(kernel: Any, grid: tuple[int, ...], args: tuple[object, ...], options: dict[str, object]) -> Any:
    """Launches a kernel, and returns its variant. Triton looks for that once for each kind of arguments."""
    named = kernel.arg_names[len(args) :]
    whole = (*args, *[options[name] for name in named])
    device, kinds = _device_of(whole), kinds_of(kernel, whole)
    if device is None or kinds is None:
        return kernel[grid](*args, **options)
    variant = id(kernel), device, kinds, tuple(each for each in options.items() if each[0] not in named)
    call = _calls.get(variant)
    if call is not None:
        call(device, grid, whole)
        return call.compiled
    compiled = kernel[grid](*args, **options)
    _calls[variant] = _Call(compiled, len(whole))
    _kernels.append(kernel)
    return compiled


def _device_of(args: tuple[object, ...]) -> torch.device | None:
    """The GPU of the first tensor on one."""
    return next((each.device for each in args if isinstance(each, torch.Tensor) and each.is_cuda), None)


def kinds_of(kernel: Any, args: tuple[object, ...]) -> tuple[Hashable, ...] | None:
    """Tells apart all arguments for which Triton compiles a kernel apart; None for those that only Triton can.

    Triton compiles a kernel for the values of constexpr arguments, for dtypes and alignments of tensors, on AMD also
    for whether 32 bits reach all of one's memory, and for integers that are 1, multiples of 16, or beyond 32 bits.
    args: all of the kernel's arguments in order
    """
    kinds: list[Any] = []
    for parameter, value in zip(kernel.params, args, strict=True):
        if parameter.is_constexpr or value is None:
            kinds.append(value)
        elif isinstance(value, torch.Tensor):
            kinds.append((value.dtype, value.is_cuda, value.data_ptr() % 16 == 0))
        elif type(value) is int:
            kinds.append((value % 16 == 0, value == 1, -(2**31) <= value < 2**31, value < 2**63))
        elif type(value) in (bool, float):
            kinds.append(type(value))
        else:
            return None
    return (*kinds, *_are_far(args))


def _are_far(args: tuple[object, ...]) -> tuple[bool, ...]:
    """On AMD, for each tensor, whether it is in 2 GiB of memory or more: places in a smaller one have 32 bits."""
    if torch.version.hip is None:
        return ()
    # A list, and no call for each: repeated launches are in every step.
    return tuple([each.untyped_storage().nbytes() >= _INT32_BYTES for each in args if isinstance(each, torch.Tensor)])


def _note(kernel: Any, compiled: Any, grid: tuple[int, ...], args: tuple[object, ...], options: Any) -> None:
    """Notes a launch that this thread has made."""
    notes = _notes.get(get_ident())
    if notes is not None:
        notes.add(kernel, compiled, grid, args, options)


def _note_other_work() -> None:
    """Notes that this thread launches work that is not noted argument by argument."""
    notes = _notes.get(get_ident())
    if notes is not None:
        notes.is_whole = False


def run_as_launch(fn: Callable[..., object], *args: object, **options: object) -> None:
    """Runs fn(*args, **options); a recorder notes it as one launch: work of a CPU that depends on values of tensors."""
    _note_other_work()
    if observers and (observer := _observer_here()):
        observer(partial(fn, *args, **options))
    else:
        fn(*args, **options)


def as_launch(fn: Callable[Given, None]) -> Callable[Given, None]:
    """Returns fn, called by run_as_launch()."""

    @functools.wraps(fn)
    def noted(*args: Given.args, **options: Given.kwargs) -> None:
        run_as_launch(fn, *args, **options)

    return noted


# The most argument tuples that a FixedLaunch keeps.
_MOST_HANDED = 64

# Launches a variant; makes its arguments from the given ones and constants; those constants.
_Runner = tuple[Run, Arguments, tuple[object, ...]]


class _Call:
    """A compiled variant, reduced to one call of the driver: grid, stream and arguments differ in each.

    num_args: of the kernel's arguments, constexpr ones included
    """

    def __init__(self, compiled: Any, num_args: int) -> None:
        self.compiled = compiled
        places = [ArgumentPlace(number) for number in range(4 + num_args)]
        run, template = driver_call(compiled, places[:3], places[3], places[4:])
        self._runner = _runner(run, template, len(places), compiled)

    def __call__(self, device: torch.device, grid: tuple[int, ...], args: tuple[object, ...]) -> None:
        run, arguments, constants = self._runner
        # For a tensor the launcher would ask the driver for its address; for one in host memory it has to.
        given = [arg.data_ptr() if isinstance(arg, torch.Tensor) and arg.is_cuda else arg for arg in args]
        # torch._C: Triton's own query of the stream costs as much as the launch.
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        run(*arguments((*(*grid, 1, 1)[:3], stream, *given, *constants)))


# Calls that launch() makes, by kernel, device, kinds of arguments and options. Kernels are held: no other has their id.
_calls: dict[Hashable, _Call] = {}
_kernels: list[Any] = []


class RepeatedLaunch:
    """A kernel that is launched once per step with arguments of the same kind.

    Triton looks at every argument of every launch to find the compiled variant that it needs, and launch() does too.
    That costs more than all other host work of a replayed step, so the variant is kept here by device, and on AMD by
    which tensors are far: dtypes and constexpr arguments must always be the same, and the kernel must not be
    specialised on the values and alignments of the others.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._calls: dict[Hashable, _Call] = {}

    def __call__(self, device: torch.device, grid: tuple[int, int, int], *args: object, **options: object) -> None:
        """kernel[grid](*args, **options); args are all of the kernel's arguments in order, constexpr ones included."""
        if observers and (observer := _observer_here()):
            observer(partial(self._kernel[grid], *args, **{**_OPTIONS, **options}))
            return
        variant = device, _are_far(args)
        call = self._calls.get(variant)
        if call is not None:
            call(device, grid, args)
            compiled = call.compiled
        else:
            compiled = self._kernel[grid](*args, **{**_OPTIONS, **options})
            if compiled is not None:  # under the interpreter there is nothing to keep
                self._calls[variant] = _Call(compiled, len(args))
        if _notes:
            _note(self._kernel, compiled, grid, args, {**_OPTIONS, **options})


def repeated_launches(kernel: Any) -> Callable[..., RepeatedLaunch]:
    """Returns a function from a variant of a kernel to its RepeatedLaunch.

    Variants differ in dtypes and constexpr arguments.
    """
    return functools.cache(lambda *variant: RepeatedLaunch(kernel))


class FixedLaunch:
    """A kernel that is launched once per step with the same arguments except the first few.

    It works like `RepeatedLaunch`, but also looks up the addresses of the fixed tensors only once, which Triton does at
    every launch, tensor by tensor. The kernel must not be specialised on the alignment of the arguments of each call.

    fixed:   all of the kernel's arguments after the first few, in order, constexpr ones included
    options: num_warps and the like
    """

    def __init__(
        self, kernel: Any, device: torch.device, grid: tuple[int, int, int], *fixed: object, **options: object
    ) -> None:
        self._kernel, self._device, self._grid = kernel, device.index, grid
        self._fixed, self._options = fixed, {**_OPTIONS, **options}
        self._addresses = tuple(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in fixed)
        self._runner: _Runner | None = None
        # The stream and the given addresses -> the arguments of the driver's function.
        self._handed: dict[tuple[int, ...], tuple[object, ...]] = {}

    def __call__(self, *first: torch.Tensor) -> None:
        """Launches on the current stream. first: the arguments that are not fixed, on the device or in pinned memory.

        Pinned memory has one address on the host and on the device: CUDA and ROCm have unified addressing on all 64-bit
        systems. So the driver is not asked for one. The first launch is Triton's own, which does ask.
        """
        if _notes:
            _note_other_work()
        if observers and (observer := _observer_here()):
            observer(partial(self._kernel[self._grid], *first, *self._fixed, **self._options))
        elif self._runner is not None:
            given = torch._C._cuda_getCurrentRawStream(self._device), *[tensor.data_ptr() for tensor in first]
            handed = self._handed.get(given)
            if handed is None:
                handed = self._hand(given)
            self._runner[0](*handed)
        else:
            compiled = self._kernel[self._grid](*first, *self._fixed, **self._options)
            if compiled is not None and self._device is not None:  # under the interpreter there is nothing to keep
                places = [ArgumentPlace(1 + at) for at in range(len(first))]
                call = driver_call(compiled, self._grid, ArgumentPlace(0), (*places, *self._addresses))
                self._runner = _runner(*call, 1 + len(first), compiled)

    def _hand(self, given: tuple[int, ...]) -> tuple[object, ...]:
        """Makes the arguments of a launch with these addresses, and keeps them: few ring slots come in turn."""
        assert self._runner is not None
        _, arguments, constants = self._runner
        if len(self._handed) == _MOST_HANDED:
            self._handed.clear()
        handed = self._handed[given] = arguments((*given, *constants))
        return handed


def _runner(run: Run, template: tuple[object, ...], num_given: int, compiled: Any) -> _Runner:
    constants: list[object] = []
    arguments = arguments_of(template, num_given, constants)
    constants.append(compiled)  # not an argument: held, because Triton unloads a kernel that nothing holds
    return run, arguments, tuple(constants)


def _observer_here() -> LaunchObserver | None:
    """The observer of this thread's launches, if it has any."""
    its = observers.get(get_ident())
    return its[-1] if its else None


@contextmanager
def observe_launches(observer: LaunchObserver) -> Iterator[None]:
    """While active, launches of this thread go to observer instead of the device."""
    its = observers.setdefault(get_ident(), [])
    its.append(observer)
    try:
        yield
    finally:
        its.pop()
        if not its:
            observers.pop(get_ident(), None)
