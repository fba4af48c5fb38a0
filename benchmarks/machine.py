"""What a result file says about the machine and the code it was measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess

import torch


def describe_machine() -> dict[str, str]:
    """Device, versions, commit and date."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "device": device,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }


def commit() -> str:
    """The checkout's commit, with a plus sign when files differ from it.

    $BENCHMARK_COMMIT names it on a machine that got the files without their history.
    """
    if carried := os.environ.get("BENCHMARK_COMMIT"):
        return carried
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")


def version_of(package: str) -> str:
    """Version of an installed package, or 'not installed'."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
