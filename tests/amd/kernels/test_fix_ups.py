"""Corrections after other libraries' kernels: padded tokens are cleared, and dead rows of last pages are zero."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.attention.pads import launch_clear_pads
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.tails import launch_zero_tails
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.refs.cache import zero_tails
from rocm_attn.kernels.refs.pads import clear_pads
from tests.amd.kernels.attention_cases import ints
from tests.amd.vectorised import vectorised_keys, vectorised_values

Launch = Callable[..., None]
NAN = float("nan")


@pytest.mark.fast
@pytest.mark.parametrize("clear", [launch_clear_pads, clear_pads])
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (5, 80), (40, 128)])
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 7])
@pytest.mark.parametrize("with_lse", [False, True])
def test_padded_tokens_are_cleared_and_no_others(
    clear: Launch, heads: int, dim: int, num_tokens: int, with_lse: bool, kernel_device: torch.device
) -> None:
    memory = torch.randn(7, heads, dim + 8, device=kernel_device)
    memory[num_tokens:] = NAN
    before = memory.clone()
    lse = torch.randn(heads, 7, device=kernel_device).t()
    lse_before = lse.clone()
    clear(ints([9, num_tokens, 1, 0], kernel_device), memory[..., :dim], lse if with_lse else None, None)
    assert torch.equal(memory[:num_tokens], before[:num_tokens])
    assert not memory[num_tokens:, :, :dim].any()
    assert bool(memory[num_tokens:, :, dim:].isnan().all())
    cleared = num_tokens if with_lse else 7
    assert torch.equal(lse[:cleared], lse_before[:cleared])
    assert bool((lse[cleared:] == -torch.inf).all())


@pytest.mark.parametrize("zero", [launch_zero_tails, zero_tails])
@pytest.mark.parametrize(("heads", "k_dim", "v_dim", "page_size"), [(2, 16, 16, 4), (3, 80, 24, 1), (1, 192, 128, 5)])
@pytest.mark.parametrize("heads_first", [False, True])
def test_only_the_dead_rows_of_pages_that_were_just_written_are_zeroed(
    zero: Launch, heads: int, k_dim: int, v_dim: int, page_size: int, heads_first: bool, kernel_device: torch.device
) -> None:
    def pages(dim: int) -> Tensor:
        if heads_first:  # HND memory seen as [pages, page_size, heads, dim]
            return torch.full((9, heads, page_size, dim), 9.0, device=kernel_device).transpose(1, 2)
        return torch.full((9, page_size, heads, dim), 9.0, device=kernel_device)

    k_pages, v_pages = pages(k_dim), pages(v_dim)
    k_pages[0] = v_pages[0] = 0.0
    # Sequences: one token; a whole page; a page and a token; none new; a pad; empty; a length beyond its row.
    table = ints([[0, 0], [1, 7], [2, 7], [3, 4], [5, 6], [7, 8]], kernel_device)
    row_of_seq = ints([1, 2, 3, 4, 0, 0, 5], kernel_device)
    kv_len = ints([1, page_size, page_size + 1, page_size + 1, 1, 0, 2 * page_size + 1], kernel_device)
    q_len = ints([1, page_size, 2, 0, 1, 0, 1], kernel_device)
    want_k, want_v = k_pages.clone(), v_pages.clone()
    for page in (1, 4):
        want_k[page, 1:] = 0.0
        want_v[page, 1:] = 0.0
    step = StepTensors.of(table[:0], table=table, row_of_seq=row_of_seq, kv_len=kv_len, q_len=q_len)
    zero(step, LayerPages.plain(k_pages, v_pages))
    assert torch.equal(k_pages, want_k)
    assert torch.equal(v_pages, want_v)


@pytest.mark.fast
@pytest.mark.parametrize("zero", [launch_zero_tails, zero_tails])
@pytest.mark.parametrize(("heads", "k_dim", "v_dim", "page_size"), [(2, 16, 16, 4), (3, 80, 24, 8), (1, 192, 128, 16)])
@pytest.mark.parametrize("x", [4, 8])
def test_dead_rows_of_vectorised_pages_are_those_of_linear_ones(
    zero: Launch, heads: int, k_dim: int, v_dim: int, page_size: int, x: int, kernel_device: torch.device
) -> None:
    page_size = max(page_size, x)
    linear = [torch.randn(9, page_size, heads, dim, device=kernel_device) for dim in (k_dim, v_dim)]
    for pages in linear:
        pages[0] = 0.0
    vectorised = [vectorised_keys(linear[0], x), vectorised_values(linear[1], x)]
    table = ints([[0, 0], [1, 7], [2, 7], [3, 4], [5, 6], [7, 8]], kernel_device)
    row_of_seq = ints([1, 2, 3, 4, 0, 0, 5], kernel_device)
    kv_len = ints([1, page_size, page_size + 1, page_size + 1, 1, 0, 2 * page_size - 3], kernel_device)
    q_len = ints([1, page_size, 2, 0, 1, 0, 1], kernel_device)
    step = StepTensors.of(table[:0], table=table, row_of_seq=row_of_seq, kv_len=kv_len, q_len=q_len)
    for sides in (linear, vectorised):
        zero(step, LayerPages.plain(*sides))
    assert torch.equal(vectorised[0], vectorised_keys(linear[0], x))
    assert torch.equal(vectorised[1], vectorised_values(linear[1], x))
    assert bool((linear[0][8, -3:] == 0).all())
    assert bool((linear[0][8, :-3] != 0).any())
