"""A result file's description of the machine and the code that was measured."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

from rocm_attn.machine.releases import triton_version

# The Infinity Cache of MI300 and MI350, in front of HBM; torch does not know of it (AMD, "CDNA 3 architecture", 2023).
INFINITY_CACHE_BYTES = 256 << 20
# The commit of an installed package, which has none.
UNKNOWN_COMMIT = "unknown"


def cache_bytes(device: torch.device) -> int:
    """The largest cache of a GPU apart from its memory."""
    l2: int = torch.cuda.get_device_properties(device).L2_cache_size
    return max(l2, INFINITY_CACHE_BYTES) if torch.version.hip is not None else l2


def describe_machine() -> dict[str, str]:
    """Returns device, versions, commit and date."""
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
    """Returns the checkout's commit, with a plus sign if files differ from it; "unknown" for an installed package.

    $BENCHMARK_COMMIT names it on a machine that got the files without their history.
    """
    if carried := os.environ.get("BENCHMARK_COMMIT"):
        return carried
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        head, changes = _git("rev-parse", "--short=12", "HEAD"), _git("status", "--porcelain")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN_COMMIT
    return head + ("+" if changes else "")


def _git(*arguments: str) -> str:
    """Returns git's output for the checkout that this file is in. Raises OSError, CalledProcessError."""
    folder = Path(__file__).resolve().parent
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def version_of(package: str) -> str:
    """Returns the version of an installed package, or 'not installed'."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
