"""A Triton driver whose launches run in the simulator: `kernel[grid](cpu_tensors)` compiles for an AMD GPU and runs."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from rocm_attn.kernels.compile_only import AbsentDriver, activated
from rocm_attn.kernels.launch import Thunk, observe_launches
from rocm_attn.target import known_target
from tests.amd.offline.offline_driver import absent_gpu
from tests.amd.simulator.assembly import Argument, parse_assembly
from tests.amd.simulator.core import LANES, POISON
from tests.amd.simulator.kernel import Launch, SimulatedKernel
from tests.amd.simulator.memory import Allocation

ARCHS = ("gfx942", "gfx950")

# Triton keeps kernels and their launcher by device id: other ids than those of the driver that only compiles.
_FIRST_DEVICE_ID = 2_000_000

_FORMATS = {"fp32": "<f", "fp64": "<d", "i1": "<b", "u1": "<B"} | {
    f"{kind}{bits}": "<" + (code.upper() if kind == "u" else code)
    for kind in "iu"
    for bits, code in ((8, "b"), (16, "h"), (32, "i"), (64, "q"))
}


@dataclass(slots=True)
class Simulation:
    """What was simulated.

    kernels:       names, in order of launch
    mnemonics:     kernel -> the mnemonics of its machine code
    instructions:  executed by all waves
    """

    kernels: list[str] = field(default_factory=list)
    mnemonics: dict[str, frozenset[str]] = field(default_factory=dict)
    instructions: int = 0


@dataclass(frozen=True, slots=True)
class _Request:
    """grid: programs along x, y, z. arguments: (name, Triton's type) -> value, in order, constants included."""

    grid: tuple[int, int, int]
    arguments: Mapping[tuple[str, str], Any]


@contextmanager
def simulated(arch: str, *, poison: int = POISON) -> Iterator[Simulation]:
    """While active, kernels launched through rocm_attn.kernels.launch run as machine code of arch on CPU tensors.

    Raises SimulationFault, UnknownInstruction and Triton's OutOfResources, at the launch.
    """
    done = Simulation()
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "the interpreter replaces the compiler; use another process"
    gpu = absent_gpu(known_target(arch))
    driver = AbsentDriver(gpu, device_id=_FIRST_DEVICE_ID + ARCHS.index(arch), launcher=_launcher)

    def run(thunk: Thunk) -> None:
        kernel: Any = thunk()
        done.instructions += _run(arch, poison, kernel, _requests.pop())
        done.kernels.append(kernel.name)
        done.mnemonics[kernel.name] = _simulated[arch, kernel.hash].assembly.mnemonics

    with activated(driver), observe_launches(run):
        yield done


# Triton keeps a launcher for as long as its kernel: what it was called with waits here until the kernel is known.
_requests: list[_Request] = []
_simulated: dict[tuple[str, str], SimulatedKernel] = {}


def _launcher(source: Any, metadata: Any) -> Callable[..., None]:
    """Notes what a launch asks for; source.signature has the types of the arguments, constants among them."""

    def note(x: int, y: int, z: int, *rest: Any) -> None:
        # stream, function, packed metadata, launch metadata and two hooks come before the arguments.
        _requests.append(_Request((x, y, z), dict(zip(source.signature.items(), rest[6:], strict=True))))

    return note


def _run(arch: str, poison: int, kernel: CompiledKernel, request: _Request) -> int:
    """Execute a launch of a compiled kernel; returns the instructions executed."""
    key = arch, kernel.hash
    if key not in _simulated:
        _simulated[key] = SimulatedKernel(parse_assembly(kernel.asm["amdgcn"]), arch)
    num_waves = kernel.metadata.num_warps
    passed = {name: (kind, value) for (name, kind), value in request.arguments.items() if kind != "constexpr"}
    launch = Launch(
        grid=request.grid,
        num_waves=num_waves,
        lds_bytes=kernel.metadata.shared,
        arguments=_pack(_simulated[key].assembly.arguments, passed, _hidden(request.grid, num_waves)),
        allocations=[_storage(name, value) for name, (_, value) in passed.items() if isinstance(value, Tensor)],
        poison=poison,
    )
    return _simulated[key].run(launch)


def _pack(places: tuple[Argument, ...], passed: dict[str, tuple[str, Any]], hidden: Mapping[str, int]) -> bytes:
    """The kernel arguments in memory; Triton's scratch pointers are null, hidden arguments without a value poison."""
    packed = bytearray(b"\x7f" * max(place.offset + place.num_bytes for place in places))
    own = [place for place in places if not place.kind.startswith("hidden_")]
    assert len(own) == len(passed) + 2, "Triton passes something else than its arguments and two scratch pointers"
    for place, (kind, value) in zip(own, [*passed.values(), ("*", None), ("*", None)], strict=True):
        if kind.startswith("*"):
            struct.pack_into("<Q", packed, place.offset, 0 if value is None else value.data_ptr())
        else:
            struct.pack_into(_FORMATS[kind], packed, place.offset, value)
    for place in places:
        if place.kind in hidden:
            value = hidden[place.kind].to_bytes(place.num_bytes, "little")
            packed[place.offset : place.offset + place.num_bytes] = value
    return bytes(packed)


def _hidden(grid: tuple[int, int, int], num_waves: int) -> dict[str, int]:
    """What ROCm's runtime tells a kernel about its launch."""
    lanes = (LANES * num_waves, 1, 1)
    values = {"hidden_grid_dims": 3}
    for axis, programs, size in zip("xyz", grid, lanes, strict=True):
        values[f"hidden_block_count_{axis}"] = programs
        values[f"hidden_group_size_{axis}"] = size
        values[f"hidden_remainder_{axis}"] = values[f"hidden_global_offset_{axis}"] = 0
    return values


def _storage(name: str, tensor: Tensor) -> Allocation:
    assert tensor.device == torch.device("cpu"), f"{name} is on {tensor.device}"
    storage = tensor.untyped_storage()
    return Allocation(name, storage.data_ptr(), storage.nbytes())
