"""Launches in Gluon for CDNA, apart from triton_launches.py: not every Triton release has Gluon in this form."""

from rocm_attn.kernels.cdna.decode import launch_cdna_decode
from rocm_attn.kernels.cdna.extend import launch_cdna_extend
from rocm_attn.kernels.cdna.latent import launch_cdna_latent_decode
from rocm_attn.kernels.cdna.selected import launch_cdna_selected

__all__ = ["launch_cdna_decode", "launch_cdna_extend", "launch_cdna_latent_decode", "launch_cdna_selected"]
