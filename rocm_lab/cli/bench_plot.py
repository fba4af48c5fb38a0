"""`rocm-attn bench plot`: pictures of a run."""

import argparse
from pathlib import Path

from rocm_lab.bench.plots import draw, draw_serving
from rocm_lab.bench.result_file import SERVING, read_result


def run(options: argparse.Namespace) -> None:
    """Writes the pictures and prints their names. Raises BadSetting."""
    kept, folder = read_result(Path(options.result)), Path(options.folder)
    if kept.kind == SERVING:
        print(draw_serving(kept.rows, kept.machine, folder / f"{options.prefix}_serving.png"))
        return
    for path in draw(kept, folder, options.prefix):
        print(path)
