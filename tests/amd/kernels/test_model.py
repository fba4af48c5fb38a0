"""Sums with norms, gates, products of one row, and sums over ranks: the kernels against float64, or bit by bit."""

from __future__ import annotations

import pytest
import torch

from rocm_attn.kernels.model.gate import GateForm, launch_gate
from rocm_attn.kernels.model.peer_sum import launch_peer_sum
from tests.amd.kernels.attention_cases import dtypes
from tests.amd.kernels.model_cases import (
    FORMS,
    OneOfRanks,
    assert_gated,
    assert_multiplied_and_gated,
    assert_row_multiplied,
    sum_of_rows,
)


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


@pytest.mark.fast
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sizes", [(7, 64), (40, 3000)], ids=str)
def test_a_row_is_multiplied_with_a_matrix(
    sizes: tuple[int, int], has_bias: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    assert_row_multiplied(sizes, dtype, kernel_device, has_bias=has_bias)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form.kind))
@pytest.mark.parametrize("sizes", [(3, 128, 128), (64, 64, 192)], ids=str)
def test_a_few_rows_are_multiplied_and_combined(
    sizes: tuple[int, int, int], form: GateForm, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    assert_multiplied_and_gated(sizes, form, dtype, kernel_device)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (3, 1), (8, 7)])
def test_every_rank_gets_the_sum(ranks: int, rank: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    """Sums of one program and of several, one after the other."""
    of_rank = OneOfRanks(ranks, rank, kernel_device)
    for num in (8, 1304, 512):
        of_rank.assert_sums(dtype, num)


def test_a_large_sum_has_several_blocks_in_a_program(kernel_device: torch.device) -> None:
    OneOfRanks(2, 1, kernel_device).assert_sums(torch.float16, (1 << 19) + 8)


def test_the_number_of_sums_goes_on_below_zero(kernel_device: torch.device) -> None:
    of_rank = OneOfRanks(2, 1, kernel_device, begun=2**31 - 2)
    for _ in range(3):
        of_rank.assert_sums(torch.float32, 520)


@pytest.mark.fast
def test_a_sum_waits_for_the_last_rank(kernel_device: torch.device) -> None:
    OneOfRanks(3, 0, kernel_device).assert_sums(torch.float32, 1304, last_is_late=True)


def test_a_sum_that_tries_the_memory_ends_without_a_rank_that_never_comes(kernel_device: torch.device) -> None:
    of_rank = OneOfRanks(2, 0, kernel_device)
    launch_peer_sum(torch.ones(512, device=kernel_device), of_rank.memory, looks=3)
    assert of_rank.memory.counts[0] == 1
    assert of_rank.others[0].flags[0].tolist() == [1, 0]
