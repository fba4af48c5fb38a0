"""Stands in for AITER's ahead-of-time compilation of FlyDSL kernels."""
