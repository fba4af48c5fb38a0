"""What a result file says about the machine and the code it was measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

from rocm_attn.machine.releases import triton_version


def describe_machine() -> dict[str, str]:
    """Device, versions, commit and date."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "device": device,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "torch": torch.__version__,
        "triton": triton_version() or "not known",
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }


def commit() -> str:
    """The checkout's commit, with a plus sign when files differ from it; "unknown" of a package that pip installed.

    $BENCHMARK_COMMIT names it on a machine that got the files without their history.
    """
    if carried := os.environ.get("BENCHMARK_COMMIT"):
        return carried
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        head, changes = _git("rev-parse", "--short=12", "HEAD"), _git("status", "--porcelain")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changes else "")


def _git(*arguments: str) -> str:
    """What git prints of the checkout that this file is in. Raises OSError, CalledProcessError."""
    folder = Path(__file__).resolve().parent
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def version_of(package: str) -> str:
    """Version of an installed package, or 'not installed'."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
