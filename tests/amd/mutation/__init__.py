"""Every mask of every kernel is needed: without it, in a copy of the kernels, a check on a CPU goes wrong."""
