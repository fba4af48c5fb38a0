"""Merging attention over parts of the keys: the kernel and its twin, against attention over all of them."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.attention.merge_states import launch_merge_states
from rocm_attn.kernels.refs.merge_states import merge_states
from tests.amd.kernels.attention_cases import dtypes
from tests.amd.tolerances import assert_attention_close, assert_lse_close

Merge = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
Side = tuple[Tensor, Tensor]

merges = pytest.mark.parametrize("merge", [launch_merge_states, merge_states])
SHAPES = [(5, 6, 40), (1, 1, 1), (33, 8, 128), (7, 3, 64), (2, 128, 256)]


def attention(q: Tensor, k: Tensor, v: Tensor, keys: Sequence[int]) -> Side:
    """Returns attention of q [tokens, heads, dim] over some keys, in float64; NaN and -inf over none."""
    if not keys:
        return torch.full_like(q[..., :1], float("nan")).expand(*q.shape[:2], v.shape[2]), q.new_full(
            q.shape[:2], float("-inf")
        )
    logits = torch.einsum("thd,khd->thk", q, k[list(keys)])
    return torch.einsum("thk,khd->thd", logits.softmax(-1), v[list(keys)]), logits.logsumexp(-1)


def problem(tokens: int, heads: int, dim: int, num_keys: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, 8, generator=generator, dtype=torch.float64) * 2
    k = torch.randn(num_keys, heads, 8, generator=generator, dtype=torch.float64)
    return q, k, torch.randn(num_keys, heads, dim, generator=generator, dtype=torch.float64)


def as_side(side: Side, dtype: torch.dtype, device: torch.device) -> Side:
    return side[0].to(device, dtype), side[1].to(device, torch.float32)


def merged(merge: Merge, a: Side, b: Side) -> Side:
    out, lse = torch.full_like(a[0], float("nan")).contiguous(), torch.full_like(a[1], float("nan"))
    merge(*a, *b, out, lse)
    return out, lse


@pytest.mark.fast
@merges
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cut", [0, 1, 7, 12])
def test_two_parts_give_attention_over_the_whole(
    cut: int, shape: tuple[int, int, int], dtype: torch.dtype, merge: Merge, kernel_device: torch.device
) -> None:
    """This includes an empty part, whose output is NaN."""
    q, k, v = problem(*shape, num_keys=12)
    sides = [as_side(attention(q, k, v, keys), dtype, kernel_device) for keys in (range(cut), range(cut, 12))]
    out, lse = merged(merge, sides[0], sides[1])
    want, want_lse = attention(q, k, v, range(12))
    assert_attention_close(out, want.to(kernel_device), dtype)
    assert_lse_close(lse, want_lse.to(kernel_device), dtype)


@merges
def test_sides_may_be_empty_for_some_tokens_and_heads(merge: Merge, kernel_device: torch.device) -> None:
    q, k, v = problem(6, 4, 24, num_keys=9)
    a, b = (as_side(attention(q, k, v, keys), torch.float32, kernel_device) for keys in (range(4), range(4, 9)))
    whole, whole_lse = (x.to(kernel_device) for x in attention(q, k, v, range(9)))
    want, want_lse = whole.clone(), whole_lse.clone()
    for index, (empties, rest) in enumerate([((a,), b), ((b,), a), ((a, b), None)]):
        token, head = index + 1, index
        for side in empties:
            side[0][token, head], side[1][token, head] = float("nan"), float("-inf")
        want[token, head] = 0 if rest is None else rest[0][token, head]
        want_lse[token, head] = float("-inf") if rest is None else rest[1][token, head]
    out, lse = merged(merge, a, b)
    assert_attention_close(out, want, torch.float32)
    assert_lse_close(lse, want_lse, torch.float32)


@pytest.mark.fast
@merges
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_an_empty_side_is_neutral(dtype: torch.dtype, merge: Merge, kernel_device: torch.device) -> None:
    """The result is bitwise x * 1 + 0."""
    q, k, v = problem(9, 3, 40, num_keys=5)
    side = as_side(attention(q, k, v, range(5)), dtype, kernel_device)
    empty = as_side(attention(q, k, v, []), dtype, kernel_device)
    for out, lse in (merged(merge, side, empty), merged(merge, empty, side)):
        assert torch.equal(out, side[0])
        assert_lse_close(lse, side[1].double(), torch.float32)


@merges
def test_shares_far_apart_neither_overflow_nor_vanish(merge: Merge, kernel_device: torch.device) -> None:
    """exp(300) is no float32; the smaller side's share is 0."""
    ones = torch.ones(3, 1, 4, device=kernel_device)
    lse = torch.tensor([[300.0], [-300.0], [-1e30]], device=kernel_device)
    out, out_lse = merged(merge, (ones, lse), (ones * 5, lse.flip(0)))
    assert out[:, 0, 0].tolist() == [1.0, 3.0, 5.0]
    assert out_lse[0] == out_lse[2] == 300.0


@merges
def test_rows_with_gaps_are_merged_in_place(merge: Merge, kernel_device: torch.device) -> None:
    """The result may replace a side; memory between rows stays."""
    q, k, v = problem(5, 3, 24, num_keys=8)
    a, b = (as_side(attention(q, k, v, keys), torch.float32, kernel_device) for keys in (range(3), range(3, 8)))
    memory = torch.full((3, 5, 40), float("nan"), device=kernel_device)
    lses = torch.full((3, 5, 2), float("nan"), device=kernel_device)
    out, lse = memory.transpose(0, 1)[..., :24], lses.transpose(0, 1)[..., 0]
    out.copy_(a[0])
    lse.copy_(a[1])
    merge(out, lse, *b, out, lse)
    want, want_lse = (x.to(kernel_device) for x in attention(q, k, v, range(8)))
    assert_attention_close(out, want, torch.float32)
    assert_lse_close(lse, want_lse, torch.float32)
    assert memory[..., 24:].isnan().all()
    assert lses[..., 1].isnan().all()


@merges
def test_rows_of_one_element_may_have_any_stride(merge: Merge, kernel_device: torch.device) -> None:
    q, k, v = problem(5, 6, 1, num_keys=12)
    (out_a, lse_a), b = (as_side(attention(q, k, v, keys), torch.float32, kernel_device) for keys in (range(7), [8]))
    there = torch.empty(5, 1, 6, device=kernel_device).transpose(1, 2).copy_(out_a)
    assert there.stride(2) == 6
    assert all(map(torch.equal, merged(merge, (there, lse_a), b), merged(merge, (out_a, lse_a), b)))


@merges
def test_no_token_is_nothing_to_do(merge: Merge, kernel_device: torch.device) -> None:
    empty, lse = torch.empty(0, 3, 16, device=kernel_device), torch.empty(0, 3, device=kernel_device)
    merge(empty, lse, empty, lse, empty, lse)
