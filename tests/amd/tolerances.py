"""Assertions that results are as close to a float64 reference as they have to be.

The bounds are the tests' own table, which no change of the package's table moves. rocm_attn.oracle.numerics explains
such numbers; a test checks that the package's bounds are no looser than these.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.oracle.numerics import FLOAT32_ROUNDING, sum_error

# Tolerance for float32 results of a few layers, which are sums of a few hundred products, relative to the root mean
# square of all. Two libraries come within a tenth of it.
_LAYERS = 2e-4
# A quotient, a product and two differences, each half a unit in the last place of numbers that may be this large.
_ROUNDINGS_OF_A_SHAPED_LOGIT = 4
_LARGEST_LOGIT = 64.0


@dataclass(frozen=True, slots=True)
class Bound:
    """Bounds of an attention output, atol and rtol, and of its log-sum-exp."""

    atol: float
    rtol: float
    lse_atol: float
    lse_rtol: float = 1e-5


BOUNDS = {
    torch.bfloat16: Bound(atol=1e-2, rtol=1e-2, lse_atol=2e-3),
    torch.float16: Bound(atol=2e-3, rtol=2e-3, lse_atol=1e-3),
    torch.float32: Bound(atol=4e-6, rtol=4e-6, lse_atol=4e-6),
    torch.float64: Bound(atol=1e-12, rtol=1e-12, lse_atol=1e-12),
}


# The bound if the kernel rounds q, or the weights of values, to three bits after the first one: such a number is off by
# a sixteenth at most. AITER's own tests of such kernels allow 0.055 to 0.06.
EIGHT_BIT_PRODUCTS = Bound(atol=0.12, rtol=6e-2, lse_atol=0.12)


@dataclass(frozen=True, slots=True)
class LogitBound:
    """Bounds of |logits - reference| relative to |reference|, computed in float32: for the mean token and for the
    worst.

    The torch provider, which rounds where a model must, reached 0.021 and 0.110 in bf16, 0.0023 and 0.0096 in fp16 on
    SmolLM2's first 16 tokens on a CPU.
    """

    mean: float
    worst: float


LOGITS = {torch.bfloat16: LogitBound(0.035, 0.2), torch.float16: LogitBound(0.004, 0.02)}


def assert_attention_close(
    out: Tensor, reference: Tensor, dtype: torch.dtype, *, eight_bit_products: bool = False, size: float = 1.0
) -> None:
    """Checks that out, computed from inputs of the dtype, is as close to the float64 reference as the table says.

    size: the standard deviation of V
    """
    bound = EIGHT_BIT_PRODUCTS if eight_bit_products else BOUNDS[dtype]
    torch.testing.assert_close(out.double(), reference, atol=bound.atol * size, rtol=bound.rtol)


def assert_lse_close(lse: Tensor, reference: Tensor, dtype: torch.dtype) -> None:
    """Like assert_attention_close, but for log-sum-exps; -inf is allowed only where the reference has it."""
    bound = BOUNDS[dtype]
    torch.testing.assert_close(lse.double(), reference, atol=bound.lse_atol, rtol=bound.lse_rtol)


def assert_same_but_for_rounding(one: Tensor, other: Tensor) -> None:
    """Compares float32 attention computed in two ways. Each may differ from the exact result by the table's bound."""
    bound = BOUNDS[torch.float32]
    torch.testing.assert_close(one, other, atol=2 * bound.atol * _size(other), rtol=2 * bound.rtol)


def assert_layers_close(result: Tensor, expected: Tensor) -> None:
    """Compares float32 results of a small model's layers, such as logits, computed in two orders of summation."""
    torch.testing.assert_close(result, expected, atol=_LAYERS * _size(expected), rtol=_LAYERS)


def assert_products_close(product: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Checks that x @ weight.T + bias in float32 is as close to float64 as sums of that many products are."""
    exact = x.double() @ weight.double().T + bias.double()
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    assert bool(((product.double() - exact).abs() <= sum_error(x.shape[-1], size)).all())


def _size(values: Tensor) -> float:
    """Returns the root mean square of the finite values, or 1 if that is more."""
    return max(1.0, float(values[values.isfinite()].double().square().mean().sqrt()))


def assert_shaped_close(shaped: Tensor, exact: Tensor) -> None:
    """Compares logits with penalties: three roundings of numbers that are no larger than the largest of both sides."""
    size = torch.where(exact.isfinite(), exact.abs(), 0.0) + _LARGEST_LOGIT
    assert torch.equal(shaped.isneginf(), exact.isneginf())
    part = torch.where(exact.isneginf(), 0.0, (shaped.double() - exact).abs())
    assert bool((part <= _ROUNDINGS_OF_A_SHAPED_LOGIT * FLOAT32_ROUNDING * size).all()), float(part.max())


def assert_logprobs_close(logprobs: Tensor, exact: Tensor) -> None:
    """Compares float32 logprobs: the logit and the log-sum-exp are rounded, and so are exp and log."""
    bound = BOUNDS[torch.float32]
    torch.testing.assert_close(logprobs.double(), exact, atol=bound.lse_atol, rtol=bound.lse_rtol)
