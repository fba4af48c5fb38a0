"""Chooses the kernels and the page format of a model's layers, and checks that the kernels compute correct results."""
