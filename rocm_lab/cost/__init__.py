"""Predicted times of the Triton kernels on AMD GPUs."""
