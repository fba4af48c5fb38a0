"""Launches in Gluon for Hopper, apart from triton_launches.py: not every Triton release has Gluon in this form."""

from rocm_attn.kernels.hopper.extend import launch_hopper_extend
from rocm_attn.kernels.hopper.latent import launch_hopper_latent_decode
from rocm_attn.kernels.hopper.selected import launch_hopper_selected

__all__ = ["launch_hopper_extend", "launch_hopper_latent_decode", "launch_hopper_selected"]
