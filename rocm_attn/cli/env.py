"""`rocm-attn env`: facts about the machine for a bug report."""

import argparse
import importlib
import importlib.util
import json
import os
import platform
from collections.abc import Callable
from typing import Any

from rocm_attn.cli.torch_failures import first_line
from rocm_attn.machine.distributions import OWN_DISTRIBUTIONS, version_of
from rocm_attn.machine.releases import triton_version

_DISTRIBUTIONS = (*OWN_DISTRIBUTIONS, "torch", "numpy", "safetensors", "tokenizers", "gguf")


def _failure(action: Callable[[], object]) -> str:
    """Runs an action. Returns the first line of its error; "" if there is none.

    A broken torch raises ImportError, OSError, RuntimeError, AttributeError and others.
    """
    try:
        action()
    except Exception as error:
        return first_line(error)
    return ""


# This is asked while the command is imported: an interrupt that the import of torch swallows is noticed before
# anything is printed.
_TORCH_ERROR = _failure(lambda: importlib.import_module("torch"))

# Variables that Triton or the GPU's driver reads; each has changed the behaviour that a user saw.
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "TRITON_CACHE_DIR",
    "TRITON_INTERPRET",
)


def run(options: argparse.Namespace) -> None:
    """Prints versions, devices and the variables that are set."""
    facts = environment()
    if options.json:
        print(json.dumps(facts, indent=2))
        return
    for name, version in facts["versions"].items():
        print(f"{name:12} {version or 'none'}")
    for device in facts["devices"]:
        memory = f"{device['memory_bytes'] / 2**30:.0f} GiB"
        print(f"{device['device']:12} {device['name']}, {device['arch']}, {device['compute_units']} units, {memory}")
    if facts["torch_error"]:
        why = "torch cannot be imported" if _TORCH_ERROR else "torch fails to describe them"
        print(f"{'devices':12} not known: {why} ({facts['torch_error']}); run rocm-attn doctor")
    elif not facts["devices"]:
        print(f"{'devices':12} no GPU; cpu")
    for name, value in facts["variables"].items():
        print(f"{name}={value}")


def environment() -> dict[str, Any]:
    """Facts about this machine, which need no torch.

    versions:    None: not installed
    devices:     GPUs, in torch's order
    torch_error: why torch cannot be imported, or fails to describe the devices; "" if it does
    variables:   those of _VARIABLES that are set
    """
    built_for: dict[str, str | None] = {"rocm": None, "cuda": None}
    devices: list[dict[str, Any]] = []
    torch_error = (
        _TORCH_ERROR or _failure(lambda: built_for.update(_built_for())) or _failure(lambda: devices.extend(_devices()))
    )
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: version_of(name) for name in _DISTRIBUTIONS},
            "triton": triton_version() or None,
            "aiter": _aiter_version(),
            **built_for,
        },
        "devices": devices,
        "torch_error": torch_error,
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _aiter_version() -> str | None:
    """AITER's version. The distribution is amd-aiter; the registry's "aiter" is another project of that name."""
    spec = importlib.util.find_spec("aiter")
    if spec is None or spec.origin is None:  # a folder without code, such as a clone in the working directory
        return None
    return version_of("amd-aiter") or "of unknown version; the distribution amd-aiter is not installed"


def _built_for() -> dict[str, str | None]:
    import torch

    return {"rocm": torch.version.hip, "cuda": torch.version.cuda}


def _devices() -> list[dict[str, Any]]:
    import torch

    return [_device(index) for index in range(torch.cuda.device_count())]


def _device(index: int) -> dict[str, Any]:
    import torch

    from rocm_attn.machine.target import detect_target

    device = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(device)
    target = detect_target(device)
    return {
        "device": str(device),
        "name": properties.name,
        "arch": target.arch,
        "compute_units": target.compute_units,
        "memory_bytes": properties.total_memory,
    }
