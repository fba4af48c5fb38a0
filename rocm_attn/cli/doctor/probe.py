"""Imports and loads libraries in a process of its own, because that may fail, crash or take long.

    python -m rocm_attn.cli.doctor.probe torch | triton | loaded | modules PATH...

prints one JSON object in a line of its own, after words that mark it: a library's facts, the ROCm libraries that torch
has loaded, or {path: message of the dynamic linker} for modules. No GPU memory is touched.
"""

import ctypes
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rocm_attn.cli.doctor.loaded_libraries import loaded_libraries
from rocm_attn.cli.doctor.machine import ImportFailure

_TIMEOUT_S = 120
_FACTS = "rocm-attn's facts: "
_ROOT = Path(__file__).parents[3]  # the folder that rocm_attn is imported from


def probe(*arguments: str) -> dict[str, Any] | ImportFailure:
    """Runs the probe and returns the object that it prints, or why there is none."""
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rocm_attn.cli.doctor.probe", *arguments],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ImportFailure(f"it did not finish within {_TIMEOUT_S} s")
    if done.returncode < 0:
        return ImportFailure(f"the process was ended by signal {-done.returncode}")
    if done.returncode:
        return ImportFailure((done.stderr.strip().splitlines() or ["it failed without output"])[-1])
    # The library may have printed text of its own, before it and at exit.
    found = [line for line in done.stdout.splitlines() if line.startswith(_FACTS)]
    if not found:
        return ImportFailure("it ended the process early, and without an error")
    facts: dict[str, Any] = json.loads(found[-1].removeprefix(_FACTS))
    return facts


def _torch() -> dict[str, object]:
    torch = importlib.import_module("torch")
    return {
        "version": torch.__version__,
        "hip": torch.version.hip or "",
        "cuda": torch.version.cuda or "",
        "num_gpus": torch.cuda.device_count(),
    }


def _triton() -> dict[str, object]:
    triton = importlib.import_module("triton")
    return {"version": triton.__version__, "backends": sorted(importlib.import_module("triton.backends").backends)}


def _loaded() -> dict[str, object]:
    importlib.import_module("torch")
    return {"libraries": loaded_libraries(os.fsdecode(Path("/proc/self/maps").read_bytes()))}


def _modules(paths: Sequence[str]) -> dict[str, object]:
    importlib.import_module("torch")  # torch loads the libraries that modules expect to be loaded already
    errors = {}
    for path in paths:
        try:
            ctypes.CDLL(path, os.RTLD_NOW | os.RTLD_LOCAL)
            errors[path] = ""
        except OSError as error:
            errors[path] = str(error)
    return dict(errors)


def _main(arguments: Sequence[str]) -> None:
    what, *paths = arguments
    ask = {"torch": _torch, "triton": _triton, "loaded": _loaded}
    facts = ask[what]() if what != "modules" else _modules(paths)
    print(f"\n{_FACTS}{json.dumps(facts)}")


if __name__ == "__main__":
    _main(sys.argv[1:])
