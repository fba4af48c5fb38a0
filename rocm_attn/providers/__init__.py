"""Kernel providers (torch, cpu, triton, aiter): attention kernels, and the pure function that chooses among them."""
