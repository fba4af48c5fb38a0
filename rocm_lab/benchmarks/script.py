"""The command line of a benchmark, and the result file that it writes."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from rocm_lab.bench.machine import describe_machine
from rocm_lab.bench.result_file import write_json

Row = dict[str, Any]


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser that knows --out. doc: the script's own"""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the result file")
    return parser


def add_library(parser: argparse.ArgumentParser, option: str, file: str) -> None:
    """Adds an option for the path of a peer's library of PyTorch operations, and loads it; None without the option."""
    parser.add_argument(option, metavar="LIBRARY", type=_loaded, help=f"path of {file}")


def _loaded(path: str) -> str:
    torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    return path


def printed(rows: Iterable[Row]) -> list[Row]:
    """Returns all rows, each of which is printed once it is measured."""
    found = []
    for row in rows:
        found.append(row)
        print(row, flush=True)
    return found


def write(out: Path, *, of_machine: Row | None = None, **result: Any) -> None:
    """Writes a result file. of_machine: said of the machine besides its description"""
    write_json(out, {"machine": {**describe_machine(), **(of_machine or {})}, **result})
