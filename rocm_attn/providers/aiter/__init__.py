"""The aiter provider: binds kernels of ROCm/aiter, which is imported in library.py and only when one of them is used.

Facts are as of ROCm/aiter e4048607 (22 August 2026); what a release lacks is found when a runtime is built.
"""
