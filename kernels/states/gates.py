"""The gates of a recurrent layer's tokens: decays, and what scales their changes.

    size  = softplus(x + bias)        decay = factor * size
    beta  = sigmoid(y), or size if y is not given

softplus(x) = log(1 + exp(x)), as torch has it: x beyond 20.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.early import early_options, starts_early, wait_for_launch
from rocm_attn.kernels.launch import launch, only_launches

_BLOCK = 512
_LINEAR_FROM = tl.constexpr(20.0)


@triton.jit
def softplus(x):
    """float32. The quotient is 1, but for the rounding of 1 + exp(x), which it takes back."""
    power = tl.exp(tl.minimum(x, _LINEAR_FROM))
    sum_ = 1.0 + power
    small = tl.where(sum_ == 1.0, power, tl.log(sum_) * (power / tl.where(sum_ == 1.0, 1.0, sum_ - 1.0)))
    return tl.where(x <= _LINEAR_FROM, small, x)


@triton.jit(do_not_specialize=["x_row", "y_row"])
def _gates_kernel(
    x,
    y,
    bias,
    factor,
    decay,
    beta,
    x_row,
    y_row,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    WIDTH: tl.constexpr = HEADS * CHANNELS
    wait_for_launch(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < WIDTH
    biased = tl.load(x + token * x_row + column, mask=is_column, other=0.0).to(tl.float32)
    size = softplus(biased + tl.load(bias + column, mask=is_column, other=0.0))
    rates = size * tl.load(factor + column // CHANNELS, mask=is_column, other=0.0)
    tl.store(decay + token * WIDTH + column, rates, mask=is_column)
    strength = size
    if y is not None:
        strength = tl.sigmoid(tl.load(y + token * y_row + column, mask=column < HEADS, other=0.0).to(tl.float32))
    tl.store(beta + token * HEADS + column, strength, mask=column < HEADS)


@only_launches
def launch_gates(x: Tensor, y: Tensor | None, bias: Tensor, factor: Tensor, decay: Tensor, beta: Tensor) -> None:
    """Writes the gates of each token.

    x:      float32, float16 or bfloat16 [T, W], W = H * C: C channels of each of H heads
    y:      [T, H], of any of these dtypes; None, where C is 1: beta is the size
    bias:   float32 [W]
    factor: float32 [H] or [H, 1]
    decay:  float32 [T, W], written
    beta:   float32 [T, H], written
    Rows of x and y have any strides, all else is contiguous.
    """
    num_tokens, width = decay.shape
    heads = beta.shape[1]
    assert x.shape == decay.shape
    assert len(bias) == width
    assert factor.numel() == heads
    assert width == heads or y is not None
    assert all(each.dtype == torch.float32 and each.is_contiguous() for each in (bias, factor, decay, beta))
    assert x.stride(1) == 1
    assert y is None or (y.shape == beta.shape and y.stride(1) == 1)
    early = starts_early(decay.device)
    launch(
        _gates_kernel,
        (num_tokens, triton.cdiv(width, _BLOCK)),
        x,
        y,
        bias,
        factor,
        decay,
        beta,
        x.stride(0),
        0 if y is None else y.stride(0),
        HEADS=heads,
        CHANNELS=width // heads,
        BLOCK=_BLOCK,
        EARLY=early,
        num_warps=2,
        **early_options(early),
    )
