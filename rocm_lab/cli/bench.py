"""`rocm-attn bench`: kernels side by side, two runs compared, pictures, and servers under a trace of requests."""

from __future__ import annotations

import argparse
import importlib


def run(options: argparse.Namespace) -> None:
    """Runs the subcommand; a module of this package has the name of each."""
    importlib.import_module(f"rocm_lab.cli.bench_{options.what}").run(options)
