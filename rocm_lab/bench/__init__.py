"""`rocm-attn bench`: comparisons of kernels and of runs, and servers under a trace of requests."""
