"""The versions that a server runs, for the labels of rocm_attn_build_info."""

import importlib.metadata
import json

from rocm_attn.machine.distributions import TRITON_DISTRIBUTIONS, version_of

# Label -> the distributions that may bring it, the first one that is installed.
_DISTRIBUTIONS = {
    "version": ("rocm-attn",),
    "torch": ("torch",),
    "triton": TRITON_DISTRIBUTIONS,
    "aiter": ("amd-aiter",),
}


def build_facts(arch: str) -> dict[str, str]:
    """Returns label -> value; a value that is not known is empty. arch: of the device, such as gfx942"""
    return {
        **{label: next(filter(None, map(version_of, names)), "") for label, names in _DISTRIBUTIONS.items()},
        "commit": _commit(),
        "arch": arch,
    }


def _commit() -> str:
    """Returns the commit that was installed by its URL; empty if another source was installed."""
    try:
        installed = importlib.metadata.distribution("rocm-serve").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        installed = None
    return str(json.loads(installed or "{}").get("vcs_info", {}).get("commit_id", ""))
