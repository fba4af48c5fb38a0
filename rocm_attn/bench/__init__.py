"""`rocm-attn bench`: kernels side by side, compared runs, and servers under a trace of requests."""
