"""Kernel providers: the kernels that can run attention, and the pure function that chooses among them."""
