"""Launches in Gluon for CDNA, apart from triton_launches.py: not every Triton release has Gluon in this form."""

from __future__ import annotations

from rocm_attn.kernels.cdna.decode import launch_cdna_decode

__all__ = ["launch_cdna_decode"]
