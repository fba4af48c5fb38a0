"""A kernel of Triton's is chosen, described and sized where Triton is not imported: it is needed by launches alone."""

from __future__ import annotations

import subprocess
import sys

CHOICE = """
import sys
import torch
from rocm_attn.batch.padding import PaddedShape
from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.select import select

before = "triton" in sys.modules
problem = Problem(32, 8, 128, 128, torch.bfloat16, 16, 128**-0.5, custom_mask=True)
for deterministic in (False, True):
    layers = problem if not deterministic else Problem(32, 8, 128, 128, torch.bfloat16, 16, 128**-0.5)
    for kind, kernel in select(layers, known_target("gfx942"), "triton", deterministic=deterministic).kernels.items():
        shape = PaddedShape(kind, 4, 8)
        assert kernel.bound.describe()
        assert kernel.bound.schedule.words(shape) > 0
        assert kernel.bound.workspace_words(shape) >= 0
assert not before, "torch imports Triton by itself"
assert "triton" not in sys.modules
from rocm_attn.providers.triton_later import triton_launches
assert triton_launches.OPS.store_kv is not None
assert "triton" in sys.modules
"""


def test_triton_is_imported_by_the_first_launch_and_not_by_the_choice() -> None:
    done = subprocess.run([sys.executable, "-c", CHOICE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
