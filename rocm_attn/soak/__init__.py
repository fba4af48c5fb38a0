"""Random steps of a tiny model, every output checked: `rocm-attn soak`."""
