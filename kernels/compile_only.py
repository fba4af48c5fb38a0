"""Compiles without running, for a GPU that may be absent: `kernel[grid](cpu_tensors)` fills Triton's cache.

The ordinary JIT path is used, so a kernel is specialised on the very arguments that its launcher passes (dtypes,
divisibility, storages above 2 GiB) and Triton's own check of shared memory applies. A process on that GPU finds the
result in the cache: a cache entry's key holds the target, not the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver as active_driver

# Triton caches kernels and device properties by device id: each absent GPU has an id far from any real device's.
_FIRST_DEVICE_ID = 1_000_000


@dataclass(frozen=True, slots=True)
class AbsentGpu:
    """A GPU's properties for Triton. arch: "gfx942", "sm_90", ...; lds_bytes: LDS or shared memory of a program."""

    arch: str
    compute_units: int
    wave_size: int
    lds_bytes: int

    @property
    def gpu_target(self) -> GPUTarget:
        """The target that Triton's driver would find on this GPU."""
        if self.arch.startswith("sm_"):
            return GPUTarget("cuda", int(self.arch.removeprefix("sm_")), self.wave_size)
        return GPUTarget("hip", self.arch, self.wave_size)


@dataclass(frozen=True, slots=True)
class CompileEvent:
    """A kernel that Triton compiled, or found in its cache. name: of the jitted function."""

    name: str
    was_cached: bool


# (kernel's source, kernel's metadata) -> the function that a launch of it calls
Launcher = Callable[[Any, Any], Callable[..., None]]


@contextmanager
def compile_only(gpu: AbsentGpu) -> Iterator[None]:
    """While active, Triton compiles for gpu and launches do nothing. Raises Triton's OutOfResources."""
    with activated(AbsentDriver(gpu, device_id=_device_id(gpu), launcher=_launcher_that_runs_nothing)):
        yield


@contextmanager
def activated(driver: AbsentDriver) -> Iterator[None]:
    """While active, Triton uses this driver."""
    # Triton offers no way to read the active driver that does not look for a GPU first.
    before = active_driver._active
    active_driver.set_active(driver)
    try:
        yield
    finally:
        active_driver._active = before


@contextmanager
def observe_compiles(observer: Callable[[CompileEvent], None]) -> Iterator[None]:
    """While active, observer is called for every kernel that a launch needs and this process has not loaded yet."""

    def listen(*, metadata: dict[str, Any], cache_hit: bool, **rest: object) -> None:
        observer(CompileEvent(metadata["name"], cache_hit))

    with listening(listen):
        yield


@contextmanager
def listening(listen: Callable[..., None]) -> Iterator[None]:
    """While active, Triton calls listen, with keywords, for every kernel that it compiles or finds in its cache.

    A listener that is set already is called too.
    """
    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = _with_earlier(listen, before)
    try:
        yield
    finally:
        triton.knobs.compilation.listener = before


def _with_earlier(listen: Callable[..., None], earlier: Callable[..., None] | None) -> Callable[..., None]:
    """Returns a listener that calls both."""

    def both(**compile: Any) -> None:
        listen(**compile)
        if earlier is not None:
            earlier(**compile)

    return both


def hook_compiles(begins: Callable[[str], None], ended: Callable[[bool], None]) -> None:
    """From now on Triton calls begins(name) before it compiles a kernel or takes one from its cache.

    It calls ended(was_cached) after. Hooks and listeners that are set already stay. A compile that raises is not ended.
    """
    before = triton.knobs.runtime.jit_cache_hook

    def begin(**compile: Any) -> Any:
        if before is not None and (replaced := before(**compile)):
            return replaced  # it stands for the compile
        begins(compile["fn"].name)
        return None

    def end(*, cache_hit: bool, **compile: Any) -> None:
        ended(cache_hit)

    triton.knobs.runtime.jit_cache_hook = begin
    triton.knobs.compilation.listener = _with_earlier(end, triton.knobs.compilation.listener)


@contextmanager
def cache_at(folder: str) -> Iterator[None]:
    """While active, Triton's cache is in another folder."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        yield


def cache_folder() -> str:
    """The folder of Triton's cache."""
    return str(triton.knobs.cache.dir)


class AbsentDriver:
    """A driver for Triton that answers from the data sheet of one GPU.

    device_id: id under which Triton keeps kernels and their launchers
    launcher:  makes the function that a launch calls
    """

    def __init__(self, gpu: AbsentGpu, *, device_id: int, launcher: Launcher) -> None:
        self.gpu_target = gpu.gpu_target
        self.device_id = device_id
        self.utils = _NoDevice(gpu)
        self.launcher_cls = launcher

    def get_current_target(self) -> GPUTarget:
        """The target that kernels are compiled for."""
        return self.gpu_target

    def get_current_device(self) -> int:
        """The id of the absent device."""
        return self.device_id

    def get_current_stream(self, device: int) -> int:
        """The null stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """The device of a launch's tensors."""
        return torch.device("cpu")


class _NoDevice:
    """The part of a driver that loads binaries: it loads none."""

    def __init__(self, gpu: AbsentGpu) -> None:
        self._gpu = gpu

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._gpu.lds_bytes,
            "multiprocessor_count": self._gpu.compute_units,
            "warpSize": self._gpu.wave_size,
        }

    def load_binary(self, name: str, binary: bytes, shared_bytes: int, device: int) -> tuple[None, None, int, int, int]:
        """(module, function, registers, spills, largest block); no module, so that Triton has none to unload."""
        return None, None, 0, 0, 1024


_ids: dict[AbsentGpu, int] = {}


def _device_id(gpu: AbsentGpu) -> int:
    return _ids.setdefault(gpu, _FIRST_DEVICE_ID + len(_ids))


def _launcher_that_runs_nothing(source: object, metadata: object) -> Callable[..., None]:
    return lambda *launch: None
