"""The commands `rocm-attn bench`, `cost`, `replay-step`, `soak`, `tune` and `waits`."""
