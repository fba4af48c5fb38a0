"""Random steps of a tiny model, with a check of every output: `rocm-attn soak`."""
