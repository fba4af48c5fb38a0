"""The checks that need each mask of a kernel (tests/amd/mutation) as machine code: kernels that multiply nothing."""

from functools import partial

import torch
from torch import Tensor

from tests.amd.mutation import checks
from tests.amd.mutation.memory import Memory
from tests.amd.simulator.case import KernelCase

FOLDERS = ("metadata", "sampling", "speculative")
# Those of other folders that no other case runs.
PATHS = ("attention/pads.py", "cache/move_rows.py", "cache/tails.py", "states/places.py")


class Alone(Memory):
    """Each tensor is an allocation: the simulator refuses an access past its end."""

    POISON = 0x7F7F7F7F

    def _arena(self, span: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        return torch.empty(span, dtype=dtype), 0


def run_check(path: str) -> None:
    checks.run_check(path, Alone())


def check_cases(arch: str) -> list[KernelCase]:
    return [
        KernelCase(path.removesuffix(".py"), arch, partial(run_check, path))
        for path in checks.CHECKS
        if path.startswith(FOLDERS) or path in PATHS
    ]
