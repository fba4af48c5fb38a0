"""The laboratory: random tests, benchmarks, tuning, predictions, and a simulator. No product imports it."""
