"""Finds faults of an installation or a machine and says how to fix them: `rocm-attn doctor`."""

import argparse


def run(options: argparse.Namespace) -> None:
    """See `command.run`."""
    # Imported here: Python runs `-m rocm_attn.cli.doctor.probe` after this file, and warns of a module that is loaded.
    from rocm_attn.cli.doctor import command

    command.run(options)
