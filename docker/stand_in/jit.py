"""Runs in an image as its user: AITER's own jit/core.py loads modules of its wheel, and modules that it compiles here.

python3 jit.py < this file          prints which modules were compiled, linked and loaded
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch
from aiter.jit import core
from aiter.jit.core import compile_ops
from aiter.ops import enum  # loads module_aiter_core, which AITER's wheel brought
from aiter.utility.dtypes import torch_to_aiter_pybind

PREFILL = "mha_batch_prefill_bf16_nlogits_nbias_mask_nlse_ndropout_nqscale_nsink"
LATE = "module_mha_fwd"  # one that PREBUILD_KERNELS=1 leaves out


# AITER leaves a function of this name unwrapped; others it calls through an operator of the GPU's.
@compile_ops(LATE, "same")
def compile_mha_fwd(number: int) -> int: ...


def kind(name: str) -> str:
    """Returns "linked" for a module of the wheel or "compiled" for one compiled here, by where AITER looks for it."""
    path = Path(core.get_user_jit_dir()) / f"{name}.so"
    assert path.exists(), f"{path} is not there"
    ctypes.CDLL(str(path))  # as torch-free modules are loaded
    packaged = path.is_symlink() and path.resolve().is_relative_to(Path(core.__file__).parent.resolve())
    return "linked" if packaged else "compiled"


def main() -> None:
    """Raises if a module cannot be loaded or two disagree about a type that they share."""
    assert os.getuid() != 0, "as the image's user, not as root"
    assert int(enum.ActivationType.No) == 0
    was_there = (Path(core.get_user_jit_dir()) / f"{LATE}.so").exists()
    assert compile_mha_fwd(7) == 7
    assert core.get_user_jit_dir() == os.environ["AITER_JIT_DIR"], core.get_user_jit_dir()
    assert not (Path.home() / ".aiter").exists(), "the package's modules were copied"
    tensor = torch_to_aiter_pybind(torch.ones(3))
    for name in (LATE, PREFILL):
        # A type of module_aiter_core: a module that another pybind11 made refuses it.
        assert core.get_module(name).numel(tensor) == 3, name
    print(f"module_aiter_core {kind('module_aiter_core')}")
    print(f"{PREFILL} {kind(PREFILL)}")
    print(f"{LATE} {kind(LATE)} {'before' if was_there else 'now'}")


main()
sys.stdout.flush()
