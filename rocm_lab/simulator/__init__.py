"""Runs AMD machine code on a CPU: Triton kernels, compiled for gfx942 or gfx950, with every memory access checked."""
