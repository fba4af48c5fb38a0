"""What is wrong with an installation or a machine, and how to put it right: `rocm-attn doctor`."""
