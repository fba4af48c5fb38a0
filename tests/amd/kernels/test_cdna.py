"""Kernels for CDNA on an AMD GPU, against float64 attention. Without a GPU the simulator runs the same cases."""

import pytest
import torch

from rocm_attn.kernels.tuning.cdna_tiles import ARCHS
from rocm_attn.machine.target import detect_target
from rocm_attn.providers.triton_cdna import TRITONS
from tests.amd.kernels import cdna_extend_cases, cdna_latent_cases, cdna_selected_cases
from tests.amd.kernels.attention_cases import build
from tests.amd.kernels.cdna_cases import CHOSEN_CODES, assert_decoded, cdna_cut, launch_cdna, served_cases
from tests.amd.kernels.sparse_cases import build_selected

GPU = torch.device("cuda")


def arch_here() -> str:
    """Returns the arch of this machine's GPU if the kernels serve it, else nothing."""
    if not torch.cuda.is_available():
        return ""
    target = detect_target(GPU)
    return target.arch if target.arch in ARCHS and target.releases.triton in TRITONS else ""


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.rocm,
    pytest.mark.skipif(not arch_here(), reason=f"they run on {' or '.join(ARCHS)} with Triton {TRITONS[-1]}"),
]


@pytest.mark.parametrize("name", served_cases(ARCHS[0]))
@pytest.mark.parametrize("num_programs", [3, 40, 2432])
def test_decode_gives_what_float64_gives(name: str, num_programs: int) -> None:
    arch = arch_here()
    case = served_cases(arch).get(name)
    if case is None:
        pytest.skip(f"{arch} has no faster tiles for {name} rows")
    tensors = build(case, GPU)
    launch_cdna(arch, tensors, cdna_cut(arch, case, num_programs))
    assert_decoded(tensors)


@pytest.mark.parametrize("name", CHOSEN_CODES)
def test_small_weights_and_nan_of_codes_stay(name: str) -> None:
    tensors = CHOSEN_CODES[name](arch_here(), GPU)
    launch_cdna(arch_here(), tensors, cdna_cut(arch_here(), tensors.case))
    assert_decoded(tensors)


@pytest.mark.parametrize("name", cdna_extend_cases.NAMES)
def test_extend_gives_what_float64_gives(name: str) -> None:
    tensors = build(cdna_extend_cases.case_of(name, arch_here()), GPU)
    cdna_extend_cases.run_cdna_extend(arch_here(), tensors)
    cdna_extend_cases.assert_extended(tensors)


@pytest.mark.parametrize("name", cdna_latent_cases.cases_of(ARCHS[0]))
@pytest.mark.parametrize("compute_units", [3, 40, 304])
def test_latent_decode_gives_what_float64_gives(name: str, compute_units: int) -> None:
    tensors = build(cdna_latent_cases.cases_of(arch_here())[name], GPU)
    cdna_latent_cases.launch_cdna_latent(arch_here(), tensors, compute_units)
    assert_decoded(tensors)


@pytest.mark.parametrize("name", cdna_selected_cases.cases_of(ARCHS[0]))
@pytest.mark.parametrize("programs", cdna_selected_cases.PROGRAMS)
def test_attention_over_a_selection_gives_what_float64_gives(name: str, programs: int) -> None:
    problem = build_selected(cdna_selected_cases.cases_of(arch_here())[name], GPU)
    cdna_selected_cases.run_cdna_selected(arch_here(), problem, programs)
    problem.assert_served()
