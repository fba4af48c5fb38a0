"""The commands `rocm-attn generate` and `rocm-attn serve`."""
