"""A target as the GPU that Triton compiles for when it is not present. Importing this imports Triton."""

from rocm_attn.kernels.compile_only import AbsentGpu
from rocm_attn.machine.target import Target


def absent_gpu(target: Target) -> AbsentGpu:
    """The properties of a target that Triton asks for."""
    return AbsentGpu(target.arch, target.compute_units, target.wave_size, target.lds_bytes)
