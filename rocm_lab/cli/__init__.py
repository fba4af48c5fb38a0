"""The commands `rocm-attn bench`, `cost`, `replay-step`, `soak` and `tune`."""
