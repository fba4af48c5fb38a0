"""A search for faster tiles on the GPU that will serve: `rocm-attn tune`."""
