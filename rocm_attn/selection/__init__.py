"""Chooses the kernels and the pages of a model's layers, and checks that the kernels compute correct results."""
