"""Launches that start early: a kernel's programs start while the launch before it runs, and wait on the device for it.

CUDA calls it programmatic dependent launch (sm_90 and later); AMD's compiler has no such option. Each program of such a
kernel calls wait_for_launch() before it reads or writes what the launch before may write or read. When the next launch
starts, all launches but the last one have ended. A merge lets the next launch start at once, because the launch before
it has waited.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver


def starts_early(device: torch.device) -> bool:
    """True if a launch on the device, or for the GPU that is compiled for, may start early."""
    if device.type == "cuda":
        return _starts_early_on(device)
    if triton.knobs.runtime.interpret:
        return False
    try:
        return _is_early(driver.active.get_current_target())
    except RuntimeError:  # there is no GPU: the launch is only recorded
        return False


@functools.cache
def _starts_early_on(device: torch.device) -> bool:
    return _is_early(driver.active.get_current_target())


@functools.cache
def _is_early(target: GPUTarget) -> bool:
    return bool(target.backend == "cuda" and target.arch >= 90)


def early_options(early: bool) -> dict[str, bool]:
    """Launch options of a kernel that starts early. Other compilers do not know them."""
    return {"launch_pdl": True} if early else {}


@triton.jit
def wait_for_launch(EARLY: tl.constexpr):
    """Waits for the launch before this one, if this one has started early, and lets the next one start."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
