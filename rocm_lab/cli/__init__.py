"""The commands `rocm-attn bench`, `replay-step`, `soak`, `tune` and `waits`."""
