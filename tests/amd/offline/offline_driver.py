"""A Triton driver for a GPU that is not there: `kernel[grid](cpu_tensors)` compiles for it and runs nothing.

The ordinary JIT path is used, so a kernel is specialised on the very arguments that its launcher passes (dtypes,
divisibility, storages above 2 GiB) and Triton's own check of shared memory applies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver as active_driver

from rocm_attn.kernels.launch import Thunk, observe_launches
from rocm_attn.target import Target, known_target

GPU_TARGETS = {
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
}

# Triton caches kernels and device properties by device id: each target has one of its own, far from any real device.
_FIRST_DEVICE_ID = 1_000_000


class OfflineDriver:
    """What Triton asks of a driver, answered from the data sheet of one arch."""

    def __init__(self, arch: str) -> None:
        self.gpu_target = GPU_TARGETS[arch]
        self.device_id = _FIRST_DEVICE_ID + list(GPU_TARGETS).index(arch)
        self.utils = _OfflineUtils(known_target(arch))
        self.launcher_cls = _launcher_that_runs_nothing

    def get_current_target(self) -> GPUTarget:
        """The target that kernels are compiled for."""
        return self.gpu_target

    def get_current_device(self) -> int:
        """The id of the device that is not there."""
        return self.device_id

    def get_current_stream(self, device: int) -> int:
        """The null stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the tensors of a launch live."""
        return torch.device("cpu")


class _OfflineUtils:
    """The part of a driver that loads binaries: it loads none."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self.target.lds_bytes,
            "multiprocessor_count": self.target.compute_units,
            "warpSize": self.target.wave_size,
        }

    def load_binary(self, name: str, binary: bytes, shared_bytes: int, device: int) -> tuple[None, None, int, int, int]:
        """(module, function, registers, spills, largest block); no module, so that Triton has none to unload."""
        return None, None, 0, 0, 1024


def _launcher_that_runs_nothing(source: object, metadata: object) -> Callable[..., None]:
    return lambda *launch: None


@contextmanager
def offline(arch: str) -> Iterator[None]:
    """While active, Triton compiles for arch and launches do nothing. Raises Triton's OutOfResources."""
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "the interpreter replaces the compiler; use another process"
    # Triton offers no way to read the active driver that does not look for a GPU first.
    before = active_driver._active
    active_driver.set_active(OfflineDriver(arch))
    try:
        yield
    finally:
        active_driver._active = before


def compiled_by(call: Callable[[], object], arch: str) -> list[CompiledKernel]:
    """The kernels that call launches through rocm_attn.kernels.launch, compiled for arch, in order of launch."""
    kernels: list[Any] = []

    def compile_only(thunk: Thunk) -> None:
        kernels.append(thunk())

    with offline(arch), observe_launches(compile_only):
        call()
    return kernels
