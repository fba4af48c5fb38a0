"""AITER's own Triton kernels, from a checkout, under Triton's interpreter and the provider."""

import pytest

from tests.amd.aiter_source.cases import Verdict
from tests.amd.aiter_source.engines import interpret
from tests.amd.aiter_source.selected import ALL_INTERPRETED, AnyCase

# NumPy warns where a kernel computes with -inf or NaN in lanes that it masks.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("case", ALL_INTERPRETED, ids=str)
def test_a_kernel_of_aiters_gives_the_right_answer(case: AnyCase) -> None:
    outcome = interpret(case)
    assert outcome.verdict is not Verdict.WRONG, outcome.what
    if outcome.verdict is Verdict.REFUSED:
        pytest.skip(outcome.what)
