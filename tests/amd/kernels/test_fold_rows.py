"""Rows that several tokens' values and gates are folded into: the kernel and its twin equal the formula in float64."""

import pytest
import torch

from rocm_attn.kernels.cache.fold_rows import launch_fold_rows
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.refs.cache import fold_rows
from rocm_attn.problem import Row
from tests.amd.kernels.attention_cases import ints
from tests.amd.kernels.fold_cases import Fold, assert_folded, folded_by, step_of_state
from tests.amd.worlds.compressed import folded

both = pytest.mark.parametrize("fold", [launch_fold_rows, fold_rows], ids=["kernel", "twin"])


@pytest.mark.fast
@both
@pytest.mark.parametrize(
    ("row", "columns", "page_size"),
    [
        (Row(4, overlaps=True), 24, 8),
        (Row(2), 130, 4),
        (Row(128), 16, 128),
        (Row(3, overlaps=True), 8, 6),
        (Row(16), 8, 32),
        (Row(4, overlaps=True, state_dtype=torch.bfloat16), 24, 8),
    ],
    ids=str,
)
def test_a_row_is_the_mean_of_its_tokens_by_the_softmax_of_their_gates(
    fold: Fold, row: Row, columns: int, page_size: int, kernel_device: torch.device
) -> None:
    """The first row of a sequence, rows over two pages, several rows of a step, and none."""
    tokens = row.tokens
    kv_len = [tokens, 2 * tokens + 1, 3 * tokens, tokens - 1, 3 * tokens]
    found, wanted = folded_by(fold, row, columns, kv_len, [tokens, 3, 2 * tokens, 1, 1], page_size, kernel_device)
    assert [len(rows) for rows in found] == [1, 1 if tokens > 1 else 3, 2, 0, 1]
    assert_folded(found, wanted)


@both
@pytest.mark.parametrize("size", [0.1, 3.0, 20.0])
def test_a_state_in_bfloat16_adds_no_larger_error_than_its_bound(
    size: float, fold: Fold, kernel_device: torch.device
) -> None:
    """The bound holds in each column, and no bound of a fiftieth does."""
    generator, columns = torch.Generator().manual_seed(0), 64
    values, gates = (torch.randn(4, columns, generator=generator) * each for each in (1.0, size))
    pages = LayerPages.plain(*(each.bfloat16()[None, :, None].to(kernel_device) for each in (values, gates)))
    at = (ints([[0]], kernel_device), ints([0], kernel_device), ints([3], kernel_device))
    rows = torch.empty(1, columns, device=kernel_device)
    fold(pages, step_of_state(*at, ints([1, 1, 0, 0], kernel_device)), rows, tokens=4, overlaps=False)
    error = (rows[0].cpu().double() - folded(values, gates, Row(4))[0]).abs()
    bound = values.abs().amax(0).double() * (2**-8 + torch.expm1(2 * 2**-8 * gates.abs().amax(0).double()))
    assert (error <= bound).all()
    assert (error > bound / 50).any()


@pytest.mark.fast
@both
def test_gates_of_any_size_give_numbers(fold: Fold, kernel_device: torch.device) -> None:
    """One gate takes all of the weight: the row is that token's values, bit for bit."""
    values, gates = torch.randn(2, 4, 1, 8), torch.full((2, 4, 1, 8), -1e30)
    gates[1, 2] = 2e38
    rows = torch.empty(1, 8, device=kernel_device)
    at = (ints([[1]], kernel_device), ints([0], kernel_device), ints([3], kernel_device))
    pages = LayerPages.plain(values.to(kernel_device), gates.to(kernel_device))
    fold(pages, step_of_state(*at, ints([1, 1, 0, 0], kernel_device)), rows, tokens=4, overlaps=False)
    assert torch.equal(rows.cpu()[0], values[1, 2, 0])
