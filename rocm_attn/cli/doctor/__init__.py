"""What is wrong with an installation or a machine, and how to put it right: `rocm-attn doctor`."""

from rocm_attn.cli.doctor.command import run

__all__ = ["run"]
