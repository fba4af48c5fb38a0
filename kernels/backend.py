"""The compiler that launches go to, where it determines how a kernel is written."""

from __future__ import annotations

from triton import knobs
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function


@constexpr_function
def on_nvidia() -> bool:
    """True if kernels are compiled for a GPU of NVIDIA's."""
    target = None if knobs.runtime.interpret else current_target()
    return target is not None and target.backend == "cuda"
