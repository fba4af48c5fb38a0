"""Runs of decode, extend and latent decode for CDNA on a simulated arch, compared with float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from rocm_lab.simulator.launcher import Simulation, simulated
from tests.amd.kernels.attention_cases import Case, Tensors, build
from tests.amd.kernels.cdna_cases import (
    CHOSEN_CODES,
    LARGE,
    assert_decoded,
    cdna_cut,
    launch_cdna,
    served_cases,
)
from tests.amd.kernels.cdna_extend_cases import ARCHS as EXTEND_ARCHS
from tests.amd.kernels.cdna_extend_cases import LARGE as EXTEND_ABOVE
from tests.amd.kernels.cdna_extend_cases import NAMES, assert_extended, case_of, run_cdna_extend
from tests.amd.kernels.cdna_latent_cases import LARGE as LATENTS_ABOVE
from tests.amd.kernels.cdna_latent_cases import after_a_large_weight, launch_cdna_latent
from tests.amd.kernels.cdna_latent_cases import cases_of as latent_cases_of
from tests.amd.simulator.case import KernelCase
from tests.amd.simulator.large_steps import in_large_pools

_IN_EVERY_RUN = ("window", "extend-plain", "latent-plain", "latent-heads_of_2_tiles")


def run_cdna(arch: str, case: Case, *, is_large: bool = False) -> Simulation:
    """Runs a decode; it skips sequences with other than one new token. is_large: true if pools are above 4 GiB"""
    launches = partial(launch_cdna, arch, cut=cdna_cut(arch, case))
    return _simulation(arch, case, is_large, launches, assert_decoded)


def run_codes(arch: str, name: str) -> Simulation:
    """Runs a decode over codes of CHOSEN_CODES."""
    tensors = CHOSEN_CODES[name](arch, torch.device("cpu"))
    return _checked(arch, tensors, partial(launch_cdna, arch, cut=cdna_cut(arch, tensors.case)), assert_decoded)


def simulate_extend(arch: str, case: Case, *, is_large: bool = False) -> Simulation:
    """Runs an extend; it leaves sequences with one new token to decode. is_large: likewise"""
    return _simulation(arch, case, is_large, partial(run_cdna_extend, arch), assert_extended)


def run_latents(arch: str, case: Case, *, is_large: bool = False) -> Simulation:
    """Runs a decode over latent pages; it skips other sequences. is_large: likewise"""
    return _simulation(arch, case, is_large, partial(launch_cdna_latent, arch), assert_decoded)


def run_large_weight(arch: str, heads: int) -> Simulation:
    """Runs a decode over latents in codes in which many small weights follow a large one."""
    tensors = after_a_large_weight(arch, torch.device("cpu"), heads)
    return _checked(arch, tensors, partial(launch_cdna_latent, arch), assert_decoded)


def _simulation(
    arch: str, case: Case, is_large: bool, launches: Callable[[Tensors], object], check: Callable[[Tensors], None]
) -> Simulation:
    tensors = build(case, torch.device("cpu"))
    if is_large:
        tensors = in_large_pools(tensors)
    return _checked(arch, tensors, launches, check)


def _checked(
    arch: str, tensors: Tensors, launches: Callable[[Tensors], object], check: Callable[[Tensors], None]
) -> Simulation:
    with simulated(arch) as simulation:
        launches(tensors)
    check(tensors)
    return simulation


def cdna_cases(arch: str) -> list[KernelCase]:
    """A case of every run."""
    return [case for case in _cases(arch) if case.name.removeprefix("cdna-") in _IN_EVERY_RUN]


def more_cdna_cases(arch: str) -> list[KernelCase]:
    above = [
        KernelCase("cdna-above", arch, partial(run_cdna, arch, LARGE, is_large=True)),
        KernelCase("cdna-latent-above", arch, partial(run_latents, arch, LATENTS_ABOVE, is_large=True)),
    ]
    if arch in EXTEND_ARCHS:
        run = partial(simulate_extend, arch, EXTEND_ABOVE, is_large=True)
        above.append(KernelCase("cdna-extend-above", arch, run))
    return [case for case in [*_cases(arch), *above] if case.name.removeprefix("cdna-") not in _IN_EVERY_RUN]


def _cases(arch: str) -> list[KernelCase]:
    cases = served_cases(arch)
    extends = NAMES if arch in EXTEND_ARCHS else ()
    return [
        *(KernelCase(f"cdna-{name}", arch, partial(run_cdna, arch, case)) for name, case in cases.items()),
        *(KernelCase(f"cdna-codes-{name}", arch, partial(run_codes, arch, name)) for name in CHOSEN_CODES),
        *(
            KernelCase(f"cdna-latent-{name}", arch, partial(run_latents, arch, case))
            for name, case in latent_cases_of(arch).items()
        ),
        *(
            KernelCase(f"cdna-latent-weights-{heads}", arch, partial(run_large_weight, arch, heads))
            for heads in (16, 64)
        ),
        *(
            KernelCase(f"cdna-extend-{name}", arch, partial(simulate_extend, arch, case_of(name, arch)))
            for name in extends
        ),
    ]
