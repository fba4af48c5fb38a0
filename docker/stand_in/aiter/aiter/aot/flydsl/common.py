"""Stands in for AITER's ahead-of-time compilation of FlyDSL kernels."""


def run_aot(folder: str) -> None:
    """Nothing to compile."""
