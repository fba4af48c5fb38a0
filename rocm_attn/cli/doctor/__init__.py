"""What is wrong with an installation or a machine, and how to put it right: `rocm-attn doctor`."""

from __future__ import annotations

import argparse


def run(options: argparse.Namespace) -> None:
    """As command.run."""
    # Here, because Python runs `-m rocm_attn.cli.doctor.probe` after this file, and warns of a module that it has read.
    from rocm_attn.cli.doctor import command

    command.run(options)
