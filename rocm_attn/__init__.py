"""A ROCm-first attention runtime. See docs/architecture.md."""
