"""The aiter provider: binds kernels of ROCm/aiter, which is imported in library.py and only when one of them is used.

Facts are those of ROCm/aiter e4048607 (22 August 2026); a runtime finds functions that a release lacks.
"""
