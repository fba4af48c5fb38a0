"""A Triton driver whose launches run in the simulator: `kernel[grid](cpu_tensors)` compiles for an AMD GPU and runs.

It runs all launches: of this project, of Gluon kernels, and of libraries that know nothing of the simulator.
"""

import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from rocm_attn.errors import BadSetting, BadTensor
from rocm_attn.kernels.compile_only import AbsentDriver, activated, listening
from rocm_attn.kernels.launch import Thunk, observe_launches
from rocm_attn.machine.absent_gpu import absent_gpu
from rocm_attn.machine.settings import interprets_kernels
from rocm_attn.machine.target import known_target
from rocm_lab.simulator.assembly import Argument, parse_assembly
from rocm_lab.simulator.core import LANES, POISON
from rocm_lab.simulator.faults import UnknownInstruction
from rocm_lab.simulator.kernel import Launch, SimulatedKernel
from rocm_lab.simulator.memory import Allocation
from rocm_lab.simulator.watch import Watch

ARCHS = ("gfx942", "gfx950")

# Triton keeps kernels and their launcher by device id: other ids than those of the driver that only compiles.
_FIRST_DEVICE_ID = 2_000_000

_CALL_OF_HOST = "s_sendmsg"

_FORMATS = {"fp16": "<e", "fp32": "<f", "fp64": "<d", "i1": "<b", "u1": "<B"} | {
    f"{kind}{bits}": "<" + (code.upper() if kind == "u" else code)
    for kind in "iu"
    for bits, code in ((8, "b"), (16, "h"), (32, "i"), (64, "q"))
}


@dataclass(frozen=True, slots=True)
class Code:
    """A compiled kernel.

    sha256:     of the code object
    text:       its assembly, as Triton keeps it
    lds_bytes:  LDS of a program
    num_waves:  of a program
    ttir:       what Triton makes of the source first; of Gluon's kernels there is none
    """

    kernel: str
    arch: str
    sha256: str
    text: str
    lds_bytes: int
    num_waves: int
    mnemonics: frozenset[str]
    ttir: str = ""


@dataclass(frozen=True, slots=True)
class SimulatedLaunch:
    """A launch that was run; instructions: executed by all its waves."""

    code: Code
    grid: tuple[int, int, int]
    instructions: int


@dataclass(slots=True)
class Simulation:
    """The launches that were simulated, in order."""

    launches: list[SimulatedLaunch] = field(default_factory=list)

    @property
    def kernels(self) -> list[str]:
        """The kernels' names, one for each launch."""
        return [launch.code.kernel for launch in self.launches]

    @property
    def mnemonics(self) -> dict[str, frozenset[str]]:
        """Kernel -> the mnemonics of the code that was launched last."""
        return {launch.code.kernel: launch.code.mnemonics for launch in self.launches}

    @property
    def instructions(self) -> int:
        """Instructions executed by all waves."""
        return sum(launch.instructions for launch in self.launches)


@dataclass(frozen=True, slots=True)
class _Files:
    """A kernel as Triton keeps it: its assembly, its TTIR, and the code object's sha256."""

    text: str
    ttir: str
    sha256: str


@dataclass(frozen=True, slots=True)
class _Active:
    """The settings of launches while `simulated` is active."""

    arch: str
    poison: int
    done: Simulation


@contextmanager
def simulated(arch: str, *, poison: int = POISON) -> Iterator[Simulation]:
    """While active, every Triton kernel that is launched in this process runs as machine code of arch on CPU tensors.

    arch:   "gfx942" or "gfx950"
    poison: the 32 bits of each register, and of each word of LDS, that a program has not written

    Raises BadSetting for another arch and under Triton's interpreter; at a launch BadTensor for a tensor that is not on
    the CPU, SimulationFault, UnknownInstruction and Triton's OutOfResources.
    """
    if arch not in ARCHS:
        raise BadSetting(f"arch {arch!r} is not simulated; choose {' or '.join(ARCHS)}")
    if interprets_kernels(os.environ):
        raise BadSetting("TRITON_INTERPRET=1 replaces the compiler, whose code is simulated; use a process without it")
    gpu = absent_gpu(known_target(arch))
    driver = AbsentDriver(gpu, device_id=_FIRST_DEVICE_ID + ARCHS.index(arch), launcher=_launcher)
    done = Simulation()
    _active.append(_Active(arch, poison, done))

    def launch(thunk: Thunk) -> None:
        thunk()

    try:
        # When observed, rocm_attn's launches take the ordinary path: the shorter ones need a stream of a real device.
        with (
            activated(driver),
            _kept_assembly(),
            observe_launches(launch),
            mock.patch.object(Autotuner, "run", _run_first_choice),
        ):
            yield done
    finally:
        _active.pop()


_Watch = TypeVar("_Watch", bound=Watch)


@contextmanager
def watched(watch: _Watch) -> Iterator[_Watch]:
    """While active, simulated launches of this process take turns as this watch says, and it sees all they do."""
    _watches.append(watch)
    try:
        yield watch
    finally:
        _watches.pop()


_watches: list[Watch] = [Watch()]
_active: list[_Active] = []
# By Triton's hash of a kernel, which holds the target.
_files: dict[str, _Files] = {}
_simulated: dict[str, tuple[Code, SimulatedKernel]] = {}


@contextmanager
def _kept_assembly() -> Iterator[None]:
    """While active, the assembly of every kernel that Triton compiles or finds in its cache is kept by its hash."""

    def listen(*, metadata: dict[str, Any], metadata_group: Mapping[str, str], **rest: object) -> None:
        paths = {Path(path).suffix: Path(path) for path in metadata_group.values()}
        ttir = paths[".ttir"].read_text() if ".ttir" in paths else ""
        sha256 = hashlib.sha256(paths[".hsaco"].read_bytes()).hexdigest()
        _files[metadata["hash"]] = _Files(paths[".amdgcn"].read_text(), ttir, sha256)

    with listening(listen):
        yield


def _launcher(source: Any, metadata: Any) -> Callable[..., None]:
    """Returns a function that runs one kernel's launches; source.signature has types of all arguments and constants."""

    def run(x: int, y: int, z: int, *rest: Any) -> None:
        # stream, function, packed metadata, launch metadata and two hooks come before the arguments.
        _run(metadata, (x, y, z), dict(zip(source.signature.items(), rest[6:], strict=True)))

    return run


def _run(metadata: Any, grid: tuple[int, int, int], arguments: Mapping[tuple[str, str], Any]) -> None:
    """Executes a launch. arguments: (name, Triton's type) -> value, in order, constants included."""
    active = _active[-1]
    if metadata.hash not in _simulated:
        files = _files[metadata.hash]
        assembly = parse_assembly(files.text)
        code = Code(
            metadata.name,
            active.arch,
            files.sha256,
            files.text,
            metadata.shared,
            metadata.num_warps,
            assembly.mnemonics,
            files.ttir,
        )
        _simulated[metadata.hash] = code, SimulatedKernel(assembly, active.arch)
    code, kernel = _simulated[metadata.hash]
    executed = execute(kernel, code, grid, arguments, active.poison)
    active.done.launches.append(SimulatedLaunch(code, grid, executed))


def execute(
    kernel: SimulatedKernel,
    code: Code,
    grid: tuple[int, int, int],
    arguments: Mapping[tuple[str, str], Any],
    poison: int = POISON,
) -> int:
    """Executes a launch on tensors of the CPU, and returns the instructions executed.

    arguments: (name, Triton's type) -> value, in order, constants included
    Raises BadTensor, SimulationFault, UnknownInstruction.
    """
    if _CALL_OF_HOST in kernel.assembly.mnemonics:
        raise UnknownInstruction(f"{_CALL_OF_HOST} of {code.kernel}: it prints, which the host does: leave prints out")
    passed = {name: (kind, value) for (name, kind), value in arguments.items() if kind != "constexpr"}
    for name, (kind, _) in passed.items():
        if not kind.startswith("*") and kind not in _FORMATS:
            raise BadTensor(f"{name} has Triton's type {kind}; the simulator passes tensors and plain numbers")
    return kernel.run(
        Launch(
            grid=grid,
            num_waves=code.num_waves,
            lds_bytes=code.lds_bytes,
            arguments=_pack(kernel.assembly.arguments, passed, _hidden(grid, code.num_waves)),
            allocations=[_storage(name, value) for name, (_, value) in passed.items() if isinstance(value, Tensor)],
            poison=poison,
            watch=_watches[-1],
        )
    )


def _run_first_choice(tuner: Any, *args: Any, **keywords: Any) -> Any:
    """Takes the place of an autotuner's benchmark, which needs a GPU: the first choice that it would try is run."""
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    first = tuner.prune_configs(keywords)[0]
    if first.pre_hook is not None:
        first.pre_hook({**tuner.nargs, **keywords, **first.all_kwargs()})
    return tuner.fn.run(*args, **{**first.all_kwargs(), **keywords})


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
    """Returns the values that ROCm's runtime passes to a kernel about its launch."""
    lanes = (LANES * num_waves, 1, 1)
    values = {"hidden_grid_dims": 3}
    for axis, programs, size in zip("xyz", grid, lanes, strict=True):
        values[f"hidden_block_count_{axis}"] = programs
        values[f"hidden_group_size_{axis}"] = size
        values[f"hidden_remainder_{axis}"] = values[f"hidden_global_offset_{axis}"] = 0
    return values


def _storage(name: str, tensor: Tensor) -> Allocation:
    if tensor.device != torch.device("cpu"):
        raise BadTensor(f"{name} is on {tensor.device}; the simulator reads and writes tensors of the CPU")
    storage = tensor.untyped_storage()
    return Allocation(name, storage.data_ptr(), storage.nbytes())
