"""Runs of decode for CDNA on a simulated arch, compared with float64."""

from __future__ import annotations

from functools import partial

import torch

from rocm_lab.simulator.launcher import Simulation, simulated
from tests.amd.kernels.attention_cases import Case, build
from tests.amd.kernels.cdna_cases import LARGE, assert_decoded, cdna_cut, launch_cdna, served_cases
from tests.amd.simulator.case import KernelCase
from tests.amd.simulator.large_steps import in_large_pools

_IN_EVERY_RUN = ("plain", "window")


def run_cdna(arch: str, case: Case, *, is_large: bool = False) -> Simulation:
    """Runs a decode; it skips sequences with other than one new token. is_large: true if pools are above 4 GiB"""
    tensors = build(case, torch.device("cpu"))
    if is_large:
        tensors = in_large_pools(tensors)
    with simulated(arch) as simulation:
        launch_cdna(arch, tensors, cdna_cut(arch, case))
    assert_decoded(tensors)
    return simulation


def cdna_cases(arch: str) -> list[KernelCase]:
    """A case of every run."""
    return [case for case in _cases(arch) if case.name.removeprefix("cdna-") in _IN_EVERY_RUN]


def more_cdna_cases(arch: str) -> list[KernelCase]:
    """Cases of the grid."""
    above = KernelCase("cdna-above", arch, partial(run_cdna, arch, LARGE, is_large=True))
    return [case for case in [*_cases(arch), above] if case.name.removeprefix("cdna-") not in _IN_EVERY_RUN]


def _cases(arch: str) -> list[KernelCase]:
    cases = served_cases(arch)
    return [KernelCase(f"cdna-{name}", arch, partial(run_cdna, arch, case)) for name, case in cases.items()]
