"""Kernels of other libraries for the same steps, each library imported when it is asked for."""
