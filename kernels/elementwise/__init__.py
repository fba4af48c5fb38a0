"""Elementwise work of a model between its matrix products."""
