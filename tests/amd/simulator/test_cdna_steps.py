"""Whole steps of a runtime that decodes by the kernel for CDNA, as the probe runs them, on a simulated arch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_attn.machine.releases import Releases
from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.select import select
from rocm_attn.providers.triton_cdna import TRITONS
from rocm_attn.selection import probe_runs
from rocm_lab.simulator.launcher import ARCHS, simulated

LAYER = Problem(4, 2, 64, torch.bfloat16, 16, v_head_dim=64, scale=0.125, wants_lse=True)


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ARCHS)
def test_the_probes_steps_are_right(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New sequences, a decode over them, a mixed step, and a padded one."""
    monkeypatch.setattr(probe_runs, "_STEPS", ((5, 2, 17), (1, 1, 1), (3, 1, 1), (1, 0, 1)))
    target = replace(known_target(arch), releases=Releases(triton=TRITONS[-1]), compute_units=1)
    selection = select(LAYER, target, "triton")
    with simulated(arch) as simulation:
        assert probe_runs.random_run(selection, torch.device("cpu")) is None
    assert simulation.kernels.count("_cdna_decode_kernel") == 3
