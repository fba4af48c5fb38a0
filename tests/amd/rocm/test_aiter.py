"""The capability table's entries for AITER's kernels, on the real kernels: every dtype, page size, head_dim and score.

Each kernel is called as in serving, against a float64 reference, eagerly and captured, without the probe before it: the
probe would have to reject a case that fails here.
"""

import pytest
import torch

from rocm_attn.machine import releases
from rocm_attn.machine.target import detect_target, known_target
from rocm_attn.providers.aiter import library
from tests.amd.aiter.every_kernel import Case, cases, graphs_equal_eager, largest_error, selection_of
from tests.amd.rocm.models import Measured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.rocm,
    pytest.mark.skipif(torch.version.hip is None or not torch.cuda.is_available(), reason="needs an AMD GPU"),
]

# The table's target is this machine, or an MI300X if this is no AMD machine, so that the cases can be listed.
ON_AMD = torch.version.hip is not None and torch.cuda.is_available()
HERE = detect_target(torch.device("cuda")) if ON_AMD else known_target("gfx942")
CASES = list(cases(HERE))


def test_the_installed_aiter_has_every_function_that_is_bound(measured: Measured) -> None:
    measured("AITER", releases.aiter_version())
    assert library.unavailable() == {}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_kernel_of_aiters_equals_the_reference(case: Case, device: torch.device, measured: Measured) -> None:
    selection = selection_of(case, detect_target(device), others="triton")
    measured("largest error", largest_error(case, device, selection))


@pytest.mark.parametrize("case", [case for case in CASES if case.entry.graph_safe], ids=str)
def test_a_captured_kernel_of_aiters_gives_what_it_gives_eagerly(
    case: Case, device: torch.device, measured: Measured
) -> None:
    selection = selection_of(case, detect_target(device), others="triton")
    measured("captures", graphs_equal_eager(case, device, selection))
