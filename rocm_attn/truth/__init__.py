"""Needle tests (`rocm-attn truth`): K and V by which each query's right output is known, so wrong reads show.

Every key is a random direction, and each query points to one key (a needle), so the output must be that key's V.
"""
