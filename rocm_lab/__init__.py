"""The laboratory: random tests, rocm_lab.benchmarks, tuning and predictions. No product imports it."""
