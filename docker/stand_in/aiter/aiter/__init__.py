"""Stands in for AITER in an image: its own jit/ is next to this file, its kernels are not."""

from .jit import core as core
