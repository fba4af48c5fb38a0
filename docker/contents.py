"""The contents of an image, by release.

python3 contents.py versions       a line "name version" for each part that matters
python3 contents.py aiter-cache    the folder of /cache for modules that this AITER compiles; nothing without AITER
python3 contents.py aiter-modules  the folder of the modules that AITER's wheel brought
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

_PARTS = (
    "rocm-attn",
    "rocm-serve",
    "rocm-lab",
    "amd-aiter",
    "pybind11",
    "torch",
    "triton",
    "pytorch-triton-rocm",
    "numpy",
)


def cache_folder(installed: Mapping[str, str], python: str) -> str:
    """The name of a folder for compiled modules: another AITER, torch, pybind11 or Python takes another one."""
    if "amd-aiter" not in installed:
        return ""
    parts = [f"{name}-{installed[name]}" for name in ("amd-aiter", "torch", "pybind11") if name in installed]
    return re.sub(r"[^\w.+-]", "_", "_".join([*parts, f"python-{python}"]))


def versions(installed: Mapping[str, str], facts: Mapping[str, str]) -> Iterator[str]:
    """Yields the lines of versions.txt; facts: versions of parts that are no distribution."""
    for name in _PARTS:
        if name in installed:
            yield f"{name} {installed[name]}"
    yield from (f"{name} {value}" for name, value in facts.items() if value)


def _installed() -> dict[str, str]:
    return {
        re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower(): found.version
        for found in importlib.metadata.distributions()
    }


def _facts() -> dict[str, str]:
    import torch

    release = Path("/opt/rocm/.info/version")
    commit = Path("/opt/rocm-attn/aiter-commit.txt")
    return {
        "revision": os.environ.get("REVISION", ""),
        "aiter-commit": commit.read_text().strip() if commit.is_file() else "",
        "python": platform.python_version(),
        "rocm": release.read_text().strip() if release.is_file() else "",
        "torch-hip": torch.version.hip or "",
        "torch-cuda": torch.version.cuda or "",
    }


def _aiter_modules() -> str:
    found = importlib.util.find_spec("aiter")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("AITER is not installed")
    return str(Path(found.submodule_search_locations[0]) / "jit")


def _main(arguments: list[str]) -> None:
    match arguments:
        case ["versions"]:
            print("\n".join(versions(_installed(), _facts())))
        case ["aiter-cache"]:
            print(cache_folder(_installed(), platform.python_version()))
        case ["aiter-modules"]:
            print(_aiter_modules())
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    _main(sys.argv[1:])
