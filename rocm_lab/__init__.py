"""The laboratory: random tests, benchmarks, tuning, and a simulator. No product imports it."""
