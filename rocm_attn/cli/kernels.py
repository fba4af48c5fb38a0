"""`rocm-attn kernels`: the capability table, as docs/kernels.md has it."""

from __future__ import annotations

import argparse

from rocm_attn.selection.table import markdown


def run(options: argparse.Namespace) -> None:
    """Print the table."""
    print(markdown(), end="")
