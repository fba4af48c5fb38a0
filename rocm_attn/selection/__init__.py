"""Which kernels serve a model's layers, over which pages, and whether they compute what they should."""
