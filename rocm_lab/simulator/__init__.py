"""AMD machine code on a CPU: Triton's kernels run as gfx942 or gfx950 code, with every access checked."""
