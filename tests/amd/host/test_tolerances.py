"""The bound of a float32 attention allows rounding errors, in any order of summation, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.amd.tolerances import (
    assert_as_close_as_float32,
    assert_layers_close,
    assert_same_but_for_rounding,
    attention_rounding,
)

TOKENS, KEYS, WINDOW = 300, 600, 400


def operands(head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, TOKENS, head_dim), torch.randn(2, KEYS, head_dim), torch.randn(2, KEYS, 64)


def hidden(window: int) -> Tensor:
    distance = torch.arange(KEYS - TOKENS, KEYS)[:, None] - torch.arange(KEYS)
    return (distance < 0) | (distance >= window)


def attend(q: Tensor, k: Tensor, v: Tensor, is_hidden: Tensor, scale: float) -> Tensor:
    return (q @ k.mT * scale).masked_fill(is_hidden, float("-inf")).softmax(-1) @ v


def attend_slowly(q: Tensor, k: Tensor, v: Tensor, is_hidden: Tensor, scale: float) -> Tensor:
    """Computes one product after the other, last to first: as unlike a library's sums as possible."""
    scores = torch.zeros(*q.shape[:2], KEYS)
    for dim in reversed(range(q.shape[2])):
        scores += q[:, :, dim, None] * k[:, None, :, dim]
    weights = (scores * scale).masked_fill(is_hidden, float("-inf"))
    weights = (weights - weights.amax(-1, keepdim=True)).exp()
    out = torch.zeros(*q.shape[:2], v.shape[2])
    for key in reversed(range(KEYS)):
        out += weights[..., key, None] * v[:, key, None]
    return out / weights.sum(-1, keepdim=True)


# A scale of 1 with a head of 256 is Gemma's: scores of standard deviation 16.
@pytest.mark.parametrize(("head_dim", "scale"), [(16, 0.25), (64, 0.125), (256, 1.0)])
@pytest.mark.parametrize("attention", [attend, attend_slowly])
def test_rounding_is_within_the_bound(attention: Callable[..., Tensor], head_dim: int, scale: float) -> None:
    q, k, v = operands(head_dim)
    exact, rounding = attention_rounding(q, k, v, hidden(WINDOW), scale)
    assert_as_close_as_float32(attention(q, k, v, hidden(WINDOW), scale), exact, rounding)


@pytest.mark.parametrize(("head_dim", "scale"), [(16, 0.25), (64, 0.125), (256, 1.0)])
@pytest.mark.parametrize(
    ("scale_error", "window"), [(1e-3, WINDOW), (-1e-3, WINDOW), (0.0, WINDOW + 1), (0.0, WINDOW - 1)]
)
def test_a_fault_is_beyond_the_bound(scale_error: float, window: int, head_dim: int, scale: float) -> None:
    q, k, v = operands(head_dim)
    exact, rounding = attention_rounding(q, k, v, hidden(WINDOW), scale)
    wrong = attend(q, k, v, hidden(window), scale * (1 + scale_error))
    with pytest.raises(AssertionError, match="times what rounding explains"):
        assert_as_close_as_float32(wrong, exact, rounding)


@pytest.mark.parametrize("odd", [float("inf"), float("-inf")])
def test_an_infinity_widens_no_bound(odd: float) -> None:
    one, other = torch.tensor([odd, 1.0, 2.0]), torch.tensor([odd, 1.0, 2.001])
    assert_same_but_for_rounding(one, one)
    with pytest.raises(AssertionError):
        assert_same_but_for_rounding(one, other)
    with pytest.raises(AssertionError):
        assert_layers_close(one, other)


def test_what_is_no_number_is_beyond_every_bound() -> None:
    exact = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(AssertionError, match="element 1 is nan"):
        assert_as_close_as_float32(torch.tensor([0.0, float("nan"), 0.0]), exact, torch.ones_like(exact))
