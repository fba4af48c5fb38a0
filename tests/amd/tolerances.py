"""Assertions that results are as close to a float64 reference as rocm_attn.numerics demands."""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_attn.numerics import BOUNDS, FLOAT32_ROUNDING, sum_error

# exp is off by a unit in the last place at most, and there is a division and an output to round.
_ROUNDINGS_OF_A_SHARE = 4


def assert_attention_close(out: Tensor, reference: Tensor, dtype: torch.dtype) -> None:
    """out, computed from inputs of this dtype, is as close to the float64 reference as the table demands."""
    bound = BOUNDS[dtype]
    torch.testing.assert_close(out.double(), reference, atol=bound.atol, rtol=bound.rtol)


def assert_lse_close(lse: Tensor, reference: Tensor, dtype: torch.dtype) -> None:
    """Likewise for log-sum-exp; -inf only where the reference has it."""
    bound = BOUNDS[dtype]
    torch.testing.assert_close(lse.double(), reference, atol=bound.lse_atol, rtol=bound.lse_rtol)


def assert_as_close_as_float32(out: Tensor, exact: Tensor, rounding: Tensor) -> None:
    """out lies no further from the exact output than what attention_rounding allows for each of its elements."""
    part = (out.double() - exact).abs() / rounding
    worst = int(part.nan_to_num(float("inf")).argmax())
    assert bool((part <= 1).all()), (
        f"element {worst} is {float(out.flatten()[worst])!r}, exactly it is {float(exact.flatten()[worst])!r}: "
        f"{float(part.flatten()[worst]):.3g} times what rounding explains"
    )


def attention_rounding(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention in float64, and how far attention in float32 may lie from it, element by element.

    q: [heads, tokens, head_dim]; k: [heads, keys, head_dim]; v: [heads, keys, v_head_dim]; one sequence
    hidden: bool [tokens, keys], the keys that a token does not see; each token sees one
    Returns out and its rounding, float64 [heads, tokens, v_head_dim].

    For scores s, shares p and u half a unit in float32's last place, a share is off by the relative error

        e[j] = sum_error(head_dim, |scale| * sum_d |q[d] * k[j, d]|) + (max(s) - s[j]) * u + 4 * u

    of its score, of the difference that exp is given, and of exp itself. They are normalised, so that to first order

        |out - exact| <= sum_j p[j] * e[j] * (|v[j]| + |exact|) + 2 * sum_error(keys, sum_j p[j] * |v[j]|)

    where the last term is of the two sums over the keys, shares and weighted values.
    """
    q, k, v = q.double(), k.double(), v.double()
    scores = (q @ k.mT * scale).masked_fill(hidden, float("-inf"))
    shares = scores.softmax(-1)
    exact = shares @ v
    below = (scores.amax(-1, keepdim=True) - scores).masked_fill(hidden, 0.0)
    error = sum_error(q.shape[-1], abs(scale) * (q.abs() @ k.mT.abs()))
    error += (below + _ROUNDINGS_OF_A_SHARE) * FLOAT32_ROUNDING
    wrong = shares * error
    rounding = wrong @ v.abs() + wrong.sum(-1, keepdim=True) * exact.abs()
    return exact, rounding + 2 * sum_error(k.shape[1], shares @ v.abs())
