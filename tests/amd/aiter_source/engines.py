"""Engines that run AITER's kernels without a GPU: the simulator of its machine code, or Triton's interpreter.

Triton decides at import which of them a process has: the interpreter with TRITON_INTERPRET=1, the simulator without.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from rocm_attn.kernels.compile_only import compile_only
from rocm_attn.machine.absent_gpu import absent_gpu
from rocm_attn.machine.target import known_target
from rocm_lab.simulator.launcher import simulated
from tests.amd.aiter_source.cases import Outcome, Verdict
from tests.amd.aiter_source.checkout import Checkout, imported
from tests.amd.aiter_source.selected import AnyCase

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

# The arch that interpreted kernels see: tile sizes depend on it.
INTERPRETED_ARCH = "gfx942"


@dataclass(frozen=True, slots=True)
class Run:
    """A case that was run. kernels: AITER's kernels that were launched on the simulator"""

    outcome: Outcome
    kernels: Collection[str]


def simulate(case: AnyCase, arch: str) -> Run:
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)  # then torch.empty() gives NaN
    checkout = Checkout.named()
    with simulated(arch) as simulation, imported(checkout, arch):
        outcome = case.outcome(checkout.target(arch))
    if outcome.verdict is Verdict.RIGHT and not simulation.kernels:
        outcome = replace(outcome, verdict=Verdict.WRONG, what="no kernel of AITER's was launched")
    return Run(outcome, simulation.kernels)


def interpret(case: AnyCase) -> Outcome:
    """Runs the case in Triton's interpreter."""
    assert IS_INTERPRETED, "set TRITON_INTERPRET=1"
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    checkout = Checkout.named()
    with compile_only(absent_gpu(known_target(INTERPRETED_ARCH))), imported(checkout, INTERPRETED_ARCH):
        return case.outcome(checkout.target(INTERPRETED_ARCH))
