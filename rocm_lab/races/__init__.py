"""Races in LDS between waves, and in global memory between waves and programs, as a simulated launch shows them."""
