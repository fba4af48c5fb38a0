"""Sums with norms, and gates: the kernels against float64."""

from __future__ import annotations

import pytest
import torch

from rocm_attn.kernels.elementwise.gate import GateForm, launch_gate
from tests.amd.kernels.attention_cases import dtypes
from tests.amd.kernels.elementwise_cases import FORMS, assert_gated, sum_of_rows


@pytest.mark.fast
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 40), (5, 1000), (2, 4096)])
def test_a_row_is_the_sum_and_its_norm(rows: int, width: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    sum_of_rows(rows, width, dtype, kernel_device).assert_served()


@pytest.mark.fast
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form.kind))
@pytest.mark.parametrize(("rows", "inner"), [(1, 64), (3, 1032), (2, 2048)])
def test_the_halves_of_a_row_are_combined(
    rows: int, inner: int, form: GateForm, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    assert_gated(rows, inner, form, dtype, kernel_device)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form.kind))
@pytest.mark.parametrize("place", [0, 64])
def test_nan_stays(place: int, form: GateForm, kernel_device: torch.device) -> None:
    both = torch.zeros(1, 128, device=kernel_device)
    both[0, place] = float("nan")
    out = torch.zeros(1, 64, device=kernel_device)
    launch_gate(both, out, form)
    assert out.isnan().nonzero().tolist() == [[0, 0]]
