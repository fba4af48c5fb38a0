"""Stands where AITER compiles kernels of FlyDSL ahead."""


def run_aot(folder: str) -> None:
    """Nothing to compile."""
