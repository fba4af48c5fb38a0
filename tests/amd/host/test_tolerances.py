"""The bounds of the tests' own tolerances are no wider for a value that is not finite."""

from __future__ import annotations

import pytest
import torch

from tests.amd.tolerances import assert_layers_close, assert_same_but_for_rounding


@pytest.mark.parametrize("odd", [float("inf"), float("-inf")])
def test_an_infinity_widens_no_bound(odd: float) -> None:
    one, other = torch.tensor([odd, 1.0, 2.0]), torch.tensor([odd, 1.0, 2.001])
    assert_same_but_for_rounding(one, one)
    with pytest.raises(AssertionError):
        assert_same_but_for_rounding(one, other)
    with pytest.raises(AssertionError):
        assert_layers_close(one, other)
