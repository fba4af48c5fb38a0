"""Runs of decode, extend, latent decode and attention over a selection for CDNA on a simulated arch, compared with
float64."""

from dataclasses import replace
from functools import partial

import torch

from tests.amd.kernels.attention_cases import Case, Tensors
from tests.amd.kernels.cdna_cases import CHOSEN_CODES, LARGE, assert_decoded, cdna_cut, launch_cdna, served_cases
from tests.amd.kernels.cdna_extend_cases import ARCHS as EXTEND_ARCHS
from tests.amd.kernels.cdna_extend_cases import LARGE as EXTEND_ABOVE
from tests.amd.kernels.cdna_extend_cases import NAMES, assert_extended, case_of, run_cdna_extend
from tests.amd.kernels.cdna_latent_cases import LARGE as LATENTS_ABOVE
from tests.amd.kernels.cdna_latent_cases import after_a_large_weight, launch_cdna_latent
from tests.amd.kernels.cdna_latent_cases import cases_of as latent_cases_of
from tests.amd.kernels.cdna_selected_cases import PLAIN as SELECTED_PLAIN
from tests.amd.kernels.cdna_selected_cases import after_unseen, run_cdna_selected
from tests.amd.kernels.cdna_selected_cases import cases_of as selected_cases_of
from tests.amd.kernels.sparse_cases import SelectedCase, SelectedProblem, build_selected
from tests.amd.simulator.case import KernelCase
from tests.amd.simulator.large_steps import build_step
from tests.amd.simulator.sparse_cases import with_large_pages

_IN_EVERY_RUN = (
    "window",
    "extend-plain",
    "latent-plain",
    "latent-heads_of_2_tiles",
    "selected-1_tile-1",
    "selected-unseen",
    "selected-records",
)


def run_cdna(arch: str, case: Case, *, is_large: bool = False) -> None:
    """Runs a decode; it skips sequences with other than one new token. is_large: true if pools are above 4 GiB"""
    _decode(arch, build_step(case, is_large=is_large))


def run_codes(arch: str, name: str) -> None:
    _decode(arch, CHOSEN_CODES[name](arch, torch.device("cpu")))


def _decode(arch: str, tensors: Tensors) -> None:
    launch_cdna(arch, tensors, cut=cdna_cut(arch, tensors.case))
    assert_decoded(tensors)


def simulate_extend(arch: str, case: Case, *, is_large: bool = False) -> None:
    """Runs an extend; it leaves sequences with one new token to decode. is_large: likewise"""
    tensors = build_step(case, is_large=is_large)
    run_cdna_extend(arch, tensors)
    assert_extended(tensors)


def run_latents(arch: str, case: Case, *, is_large: bool = False) -> None:
    """Runs a decode over latent pages; it skips other sequences. is_large: likewise"""
    _decode_latents(arch, build_step(case, is_large=is_large))


def run_large_weight(arch: str, heads: int) -> None:
    """Runs a decode over latents in codes in which many small weights follow a large one."""
    _decode_latents(arch, after_a_large_weight(arch, torch.device("cpu"), heads))


def _decode_latents(arch: str, tensors: Tensors) -> None:
    launch_cdna_latent(arch, tensors)
    assert_decoded(tensors)


def run_selected(arch: str, case: SelectedCase, *, programs: int = 60, is_large: bool = False) -> None:
    """Runs attention over a selection. is_large: likewise"""
    problem = build_selected(case, torch.device("cpu"))
    _select(arch, replace(problem, args=with_large_pages(problem.args)) if is_large else problem, programs)


def run_unseen(arch: str, case: SelectedCase = SELECTED_PLAIN, *, programs: int = 60) -> None:
    """Runs it over selections that begin with entries which give no key."""
    _select(arch, after_unseen(case, torch.device("cpu")), programs)


def _select(arch: str, problem: SelectedProblem, programs: int) -> None:
    run_cdna_selected(arch, problem, programs)
    problem.assert_served()


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
        for name in ("4_tiles", "1_tile", "records"):
            of_selected = partial(run_selected, arch, selected_cases_of(arch)[name], is_large=True)
            above.append(KernelCase(f"cdna-selected-{name}-above", arch, of_selected))
    return [case for case in [*_cases(arch), *above] if case.name.removeprefix("cdna-") not in _IN_EVERY_RUN]


def _cases(arch: str) -> list[KernelCase]:
    cases, selected = served_cases(arch), selected_cases_of(arch)
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
            KernelCase(f"cdna-selected-{name}", arch, partial(run_selected, arch, case))
            for name, case in selected.items()
        ),
        *(
            KernelCase(
                f"cdna-selected-{name}-{programs}", arch, partial(run_selected, arch, selected[name], programs=programs)
            )
            for name in ("4_tiles", "1_tile", "long_4_tiles", "long_1_tile", "records_4_tiles", "long_records")
            for programs in (1, 4)
        ),
        KernelCase("cdna-selected-unseen", arch, partial(run_unseen, arch)),
        KernelCase("cdna-selected-unseen-1", arch, partial(run_unseen, arch, selected["1_tile"], programs=1)),
        KernelCase("cdna-selected-unseen_records", arch, partial(run_unseen, arch, selected["records_4_tiles"])),
        *(
            KernelCase(f"cdna-extend-{name}", arch, partial(simulate_extend, arch, case_of(name, arch)))
            for name in extends
        ),
    ]
