"""A search for faster tiles on the GPU that will serve: `rocm-attn tune`."""

from rocm_lab.tune.command import run

__all__ = ["run"]
