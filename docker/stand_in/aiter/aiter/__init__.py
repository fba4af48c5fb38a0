"""AITER's place in a stand-in image: its own jit/ is beside this file, its kernels are not."""

from .jit import core as core
