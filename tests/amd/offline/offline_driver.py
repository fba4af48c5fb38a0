"""Compiles for a GPU that is not present, and returns the compiled kernels."""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from rocm_attn.kernels.compile_only import compile_only
from rocm_attn.kernels.launch import Thunk, observe_launches
from rocm_attn.machine.absent_gpu import absent_gpu
from rocm_attn.machine.target import known_target

GPU_TARGETS = {arch: absent_gpu(known_target(arch)).gpu_target for arch in ("gfx942", "gfx950", "sm_80", "sm_90")}


@contextmanager
def offline(arch: str) -> Iterator[None]:
    """While active, Triton compiles for arch and launches do nothing. Raises Triton's OutOfResources."""
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "the interpreter replaces the compiler; use another process"
    with compile_only(absent_gpu(known_target(arch))):
        yield


@contextmanager
def launched_offline(arch: str) -> Iterator[None]:
    """Like offline(), with each launch on Triton's ordinary path: the fast path keeps what only a device can run."""

    def launch(thunk: Thunk) -> None:
        thunk()

    with offline(arch), observe_launches(launch):
        yield


def compiled_by(call: Callable[[], object], arch: str) -> list[CompiledKernel]:
    """The kernels that call launches through rocm_attn.kernels.launch, compiled for arch, in order of launch."""
    kernels: list[Any] = []

    def keep(thunk: Thunk) -> None:
        kernels.append(thunk())

    with offline(arch), observe_launches(keep):
        call()
    return kernels


def _name_of(kernel: Any) -> str:
    """A kernel's name in machine code: one function may be several kernels."""
    return str(kernel.repr(None)).rpartition(".")[2]


def first_compiled_by(call: Callable[[], object], arch: str) -> dict[str, CompiledKernel]:
    """The first variant of each kernel that call launches, by name, compiled for arch; no other is compiled."""
    first: dict[str, Any] = {}
    run = JITFunction.run

    def run_first(kernel: Any, *args: Any, **options: Any) -> Any:
        name = _name_of(kernel)
        if name not in first:
            first[name] = run(kernel, *args, **options)
        return first[name]

    with patch.object(JITFunction, "run", run_first):
        compiled_by(call, arch)
    return first


def last_compiled_by(call: Callable[[], object], arch: str, names: Collection[str]) -> dict[str, CompiledKernel]:
    """Returns call's last launch of each of these kernels, by name, compiled for arch; nothing else is compiled."""
    last: dict[str, Callable[[], Any]] = {}
    run = JITFunction.run

    def keep(kernel: Any, *args: Any, **options: Any) -> None:
        if (name := _name_of(kernel)) in names:
            last[name] = partial(run, kernel, *args, **options)

    with patch.object(JITFunction, "run", keep):
        compiled_by(call, arch)
    with offline(arch):
        return {name: compiled() for name, compiled in last.items()}
