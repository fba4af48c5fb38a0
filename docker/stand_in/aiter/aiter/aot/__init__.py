"""Stands where AITER compiles kernels of FlyDSL ahead."""
