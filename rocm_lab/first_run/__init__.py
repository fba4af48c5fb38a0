"""The report of the first run on an AMD GPU (docs/rocm.md), read: `rocm-attn read-report`."""
