"""The package's one comparison with a reference, its table of bounds, and the tests' own tolerances."""

import math

import pytest
import torch

from rocm_attn.oracle.numerics import BOUNDS, Bound, error_parts
from tests.amd import tolerances
from tests.amd.tolerances import assert_layers_close, assert_same_but_for_rounding

NAN, INF = math.nan, math.inf


def test_no_bound_of_the_package_is_looser_than_the_tests_demand() -> None:
    assert BOUNDS.keys() == tolerances.BOUNDS.keys()
    for dtype, bounds in BOUNDS.items():
        demanded = tolerances.BOUNDS[dtype]
        assert bounds.out.atol <= demanded.atol, dtype
        assert bounds.out.rtol <= demanded.rtol, dtype
        assert bounds.lse.atol <= demanded.lse_atol, dtype
        assert bounds.lse.rtol <= demanded.lse_rtol, dtype


@pytest.mark.parametrize(
    ("result", "reference", "part"),
    [
        (1.0, 1.0, 0.0),
        (0.0, 0.0, 0.0),
        (2.5, 2.0, 0.5 / (0.5 + 2.0 * 0.25)),
        (-2.0, 2.0, 4.0),
        (INF, INF, 0.0),
        (-INF, -INF, 0.0),
        (INF, -INF, INF),
        (INF, 1.0, INF),
        (1.0, -INF, INF),
        (NAN, 1.0, INF),
        (1.0, NAN, INF),
        (NAN, NAN, INF),
    ],
)
def test_an_error_is_a_part_of_what_is_allowed(result: float, reference: float, part: float) -> None:
    (got,) = error_parts(torch.tensor([result]), torch.tensor([reference]), Bound(0.5, 0.25))
    assert got.dtype == torch.float64
    assert float(got) == part


def test_values_of_no_size_may_not_differ_at_all() -> None:
    parts = error_parts(torch.tensor([0.0, 1e-30]), torch.zeros(2), Bound(0.5, 0.25), size=0.0)
    assert parts.tolist() == [0.0, INF]


@pytest.mark.parametrize("odd", [float("inf"), float("-inf")])
def test_an_infinity_widens_no_bound(odd: float) -> None:
    one, other = torch.tensor([odd, 1.0, 2.0]), torch.tensor([odd, 1.0, 2.001])
    assert_same_but_for_rounding(one, one)
    with pytest.raises(AssertionError):
        assert_same_but_for_rounding(one, other)
    with pytest.raises(AssertionError):
        assert_layers_close(one, other)
