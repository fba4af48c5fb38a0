"""The compiler that launches go to, where it determines how a kernel is written."""

import triton
from triton import knobs
from triton.language import constexpr
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.hopper import releases

# A constexpr: Triton reads the globals that kernels refer to, and rejects methods of str.
_COMPILES_HOPPERS = constexpr(triton.__version__.split("+")[0] in releases.TRITONS)


@constexpr_function
def on_nvidia() -> bool:
    """True if kernels are compiled for a GPU of NVIDIA's."""
    target = None if knobs.runtime.interpret else current_target()
    return target is not None and target.backend == "cuda"


@constexpr_function
def on_hopper() -> bool:
    """True if kernels are compiled for a GPU of Hopper's generation, by a Triton that has its kernels' Gluon."""
    return on_nvidia() and current_target().arch == 90 and bool(_COMPILES_HOPPERS)
