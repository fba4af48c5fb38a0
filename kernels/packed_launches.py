"""Several launches of compiled kernels as one call: what the driver is given is written down once, as bytes.

Written down are launches that hand over pointers and numbers, without clusters, cooperation, early starts or scratch
memory; see packed(). A kernel's parameters, which Triton knows as its signature, say what each argument is.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

import torch

from rocm_attn.kernels.driver_call import Arguments, Place, Run, arguments_of, driver_call
from rocm_attn.kernels.driver_functions import driver_calls, driver_of

# A record of a launch: function, grid, threads, bytes of shared memory, number of parameters. Then its parameters.
_LAUNCH = struct.Struct("=Q6I")
# A parameter: its value, or the number of the address that takes its place; -1: its value.
_PARAMETER = struct.Struct("=8sq")
# Triton's kernels take two addresses of scratch memory after their own parameters. The driver reads none too many.
_SCRATCH = 2 * _PARAMETER.pack(bytes(8), -1)
# Above this, CUDA wants an attribute with the launch.
_MOST_SHARED_BYTES = 228 * 1024

# What a launcher does beside handing its arguments over, where one of these is not 0.
_ASKS = "launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size", "gsan_enabled"
# As in driver_functions.py.
_MOST_ADDRESSES, _MOST_PARAMETERS = 64, 256

_PACKED_AS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "fp32": "f", "f32": "f", "fp64": "d"}
_PACKED_AS |= {"u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"}


def packed(compiled: Any, grid: tuple[int, ...], arguments: Sequence[object]) -> bytes | None:
    """The record of a launch; None where it is none of those that are written down.

    arguments: all of the kernel's in order, constexpr ones included: addresses, numbers, and Places of addresses, whose
               numbers count from 1
    """
    if not all(hasattr(compiled, name) for name in ("run", "metadata", "packed_metadata", "src")):
        return None
    num_warps, num_blocks, shared_bytes = compiled.packed_metadata
    kinds = tuple(compiled.src.signature.values())
    if num_blocks != 1 or shared_bytes > _MOST_SHARED_BYTES or not _is_plain(compiled) or len(kinds) != len(arguments):
        return None
    parameters = []
    for kind, argument in zip(kinds, arguments, strict=True):
        if kind != "constexpr":
            parameter = _parameter(kind, argument)
            if parameter is None:
                return None
            parameters.append(parameter)
    if len(parameters) + 2 > _MOST_PARAMETERS:
        return None
    threads = num_warps * compiled.metadata.target.warp_size
    head = _LAUNCH.pack(compiled.function, *(*grid, 1, 1)[:3], threads, shared_bytes, len(parameters) + 2)
    return b"".join((head, *parameters, _SCRATCH))


def _is_plain(compiled: Any) -> bool:
    """Whether nothing but a grid, threads and shared memory goes with a launch."""
    of_both = compiled.run, compiled.metadata
    return hasattr(compiled.run, "launch") and not any(getattr(each, name, 0) for each in of_both for name in _ASKS)


def _parameter(kind: object, argument: object) -> bytes | None:
    """A parameter of a kind of Triton's signatures; None for a kind that is not known, or what is none of it."""
    if not isinstance(kind, str):
        return None
    if kind.startswith("*"):
        if isinstance(argument, Place):
            return _PARAMETER.pack(bytes(8), argument.number - 1)
        kind, argument = "u64", 0 if argument is None else argument
    if kind not in _PACKED_AS or not isinstance(argument, (bool, int, float)):
        return None
    try:
        return _PARAMETER.pack(struct.pack("=" + _PACKED_AS[kind], argument).ljust(8, b"\0"), -1)
    except (struct.error, OverflowError):
        return None


# Driver -> what makes launches by it.
_run_of: dict[bytes, Run] = {}

# A variant of a kernel, its grid, and all arguments of the kernel: see packed().
Prepared = tuple[Any, tuple[int, ...], Sequence[object]]


def put_together(launches: Sequence[Prepared], num_addresses: int) -> tuple[list[tuple[Run, Arguments]], list[object]]:
    """What makes these launches on the current device, and what puts its arguments together.

    Of (stream, *addresses, *constants), where the addresses take the Places 1, 2, ..., and the constants come second.
    """
    together = _together(launches, num_addresses)
    # The variants are held, though they are no arguments: Triton unloads what is held no longer.
    variants: list[object] = [compiled for compiled, _, _ in launches]
    if together is not None:
        return [together], variants
    constants: list[object] = []
    made = []
    for compiled, grid, arguments in launches:
        run, template = driver_call(compiled, grid, Place(0), arguments)
        made.append((run, arguments_of(template, 1 + num_addresses, constants)))
    return made, [*constants, *variants]


def _together(launches: Sequence[Prepared], num_addresses: int) -> tuple[Run, Arguments] | None:
    """All launches as one call; None where one of them cannot be written down."""
    records = [packed(*each) for each in launches]
    if None in records or num_addresses > _MOST_ADDRESSES:
        return None
    backends = {compiled.metadata.target.backend for compiled, _, _ in launches}
    driver = driver_of(backends.pop(), torch.cuda.current_device()) if len(backends) == 1 else None
    calls = driver_calls()
    if driver is None or calls is None:
        return None
    all_records, end = b"".join(record for record in records if record is not None), 1 + num_addresses
    run = _run_of.setdefault(driver, functools.partial(calls.launch, driver))
    return run, lambda values: (values[0], all_records, values[1:end])


def as_one_call(made: tuple[tuple[Run, tuple[object, ...]], ...]) -> tuple[tuple[Run, tuple[object, ...]], ...]:
    """What was put together, for one stream, as one call where that is possible. made: functions and arguments"""
    runs = {run for run, _ in made}
    if len(made) < 2 or len(runs) > 1 or not runs <= set(_run_of.values()):
        return made
    stream = made[0][1][0]
    return ((runs.pop(), (stream, *(part for _, arguments in made for part in arguments[1:]))),)
