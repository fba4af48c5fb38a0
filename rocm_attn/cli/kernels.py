"""`rocm-attn kernels`: the capability table, the same as in docs/kernels.md."""

import argparse

from rocm_attn.selection.table import markdown


def run(options: argparse.Namespace) -> None:
    """Prints the table."""
    print(markdown(), end="")
