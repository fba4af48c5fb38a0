"""`rocm-attn bench plot`: pictures of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from rocm_lab.bench.plots import draw
from rocm_lab.bench.result_file import read_result


def run(options: argparse.Namespace) -> None:
    """Writes the pictures and prints their names. Raises BadSetting."""
    for path in draw(read_result(Path(options.result)), Path(options.folder), options.prefix):
        print(path)
