"""KernelNotes: the kernels that Triton launches in this process, with what the compiler and the driver say of each."""

import ctypes
import hashlib
from dataclasses import asdict
from typing import Any

import torch

from rocm_lab.simulator.code_figures import CodeFigures

_BYTES_OF_A_SPILL = 4  # Triton divides what the driver says by it


class KernelNotes:
    """Notes launches from start() to stop(). A launch that goes past Triton's JIT, as replays do, is not noted.

    variants:  the code object's hash -> its entry in the report
    launched:  "module:name" of each jitted function that was launched since clear()
    """

    def __init__(self) -> None:
        self.variants: dict[str, dict[str, Any]] = {}
        self.launched: set[str] = set()
        self._run: Any = None

    def start(self) -> None:
        """Begins. Without Triton there is nothing to note."""
        try:
            from triton.runtime.jit import JITFunction
        except ImportError:
            return
        self._run = run = JITFunction.run

        def noted(kernel: Any, *args: Any, warmup: bool, **given: Any) -> Any:
            compiled = run(kernel, *args, warmup=warmup, **given)
            if not warmup and compiled is not None:
                self._note(f"{kernel.fn.__module__}:{kernel.fn.__qualname__}", compiled)
            return compiled

        JITFunction.run = noted

    def _note(self, name: str, compiled: Any) -> None:
        self.launched.add(name)
        if compiled.hash in self.variants:
            return
        try:
            self.variants[compiled.hash] = _entry(name, compiled)
        except Exception as error:  # a driver or an assembly unlike any that is known must fail no test
            self.variants[compiled.hash] = {"kernel": name, "static": None, "failure": repr(error)}

    def stop(self) -> None:
        """Ends. Must follow start()."""
        if self._run is not None:
            from triton.runtime.jit import JITFunction

            JITFunction.run = self._run

    def clear(self) -> None:
        """Forgets what was launched, but not the variants."""
        self.launched.clear()


def _entry(name: str, compiled: Any) -> dict[str, Any]:
    """A variant as docs/rocm.md describes it. name: "module:name" of the jitted function"""
    metadata = compiled.metadata
    assembly, code = compiled.asm.get("amdgcn"), compiled.asm.get("hsaco") or compiled.asm.get("cubin") or b""
    static = assembly and asdict(CodeFigures.of(assembly, metadata.target.arch, metadata.shared, metadata.num_warps))
    return {
        "kernel": name,
        "arch": str(metadata.target.arch),
        "sha256": hashlib.sha256(code).hexdigest(),
        "num_waves": metadata.num_warps,
        "lds_bytes": metadata.shared,
        "static": static,
        "driver": {
            "registers": compiled.n_regs,
            "scratch_bytes": compiled.n_spills * _BYTES_OF_A_SPILL,
            "programs_per_cu": programs_per_cu(compiled),
        },
    }


def programs_per_cu(compiled: Any) -> int:
    """The programs of a loaded kernel that a compute unit has room for, says the driver; 0 if it does not say."""
    metadata = compiled.metadata
    if not torch.cuda.is_available():
        return 0
    if torch.version.hip is not None:
        from triton.backends.amd.driver import _get_path_to_hip_runtime_dylib

        driver = ctypes.CDLL(_get_path_to_hip_runtime_dylib())
        ask = driver.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor
    else:
        ask = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveBlocksPerMultiprocessor
    count = ctypes.c_int()
    lanes = metadata.num_warps * metadata.target.warp_size
    function, lds_bytes = ctypes.c_void_p(compiled.function), ctypes.c_size_t(metadata.shared)
    failed = ask(ctypes.byref(count), function, ctypes.c_int(lanes), lds_bytes)
    return 0 if failed else count.value
