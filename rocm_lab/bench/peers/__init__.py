"""Kernels of other libraries for the same steps, each imported when it is asked for."""
