"""Kernels that only use codes.py, for suites that compare every code with torch's casts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.cache.codes import decoded, encoded, group_scales
from rocm_attn.kernels.cache.page_format import Encoding
from rocm_attn.kernels.launch import launch

FP8 = (Encoding.E4M3FN, Encoding.E4M3FNUZ, Encoding.E5M2)
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _decode_kernel(codes, numbers, N: tl.constexpr, ENCODING: tl.constexpr, DTYPE: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(numbers + i, decoded(tl.load(codes + i), ENCODING, DTYPE))


@triton.jit
def _encode_kernel(numbers, codes, N: tl.constexpr, ENCODING: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(codes + i, encoded(tl.load(numbers + i).to(tl.float32), ENCODING))


@triton.jit
def _scales_kernel(exponents, scales, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(scales + i, group_scales(tl.load(exponents + i)))


def decode_all(encoding: Encoding, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns codes 0 to 255 as a kernel reads them, and as torch does."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    numbers = torch.empty(256, dtype=dtype, device=device)
    launch(_decode_kernel, (1,), codes, numbers, N=256, ENCODING=encoding.number, DTYPE=_TYPES[dtype], num_warps=1)
    return numbers, codes.cpu().view(encoding.dtype).to(dtype).to(device)


def encode(numbers: Tensor, encoding: Encoding) -> tuple[Tensor, Tensor]:
    """Returns codes of numbers as a kernel writes them, and as torch does after clamping to the largest."""
    block = 1024
    numbers = torch.cat([numbers, numbers.new_zeros(-len(numbers) % block)])
    codes = torch.empty(len(numbers), dtype=torch.uint8, device=numbers.device)
    launch(_encode_kernel, (len(numbers) // block,), numbers, codes, N=block, ENCODING=encoding.number, num_warps=1)
    kept = numbers.cpu().float().clamp(-encoding.largest, encoding.largest)
    return codes, kept.to(encoding.dtype).view(torch.uint8).to(numbers.device)


def scales_of_exponents(exponents: Tensor) -> Tensor:
    """Returns scales of records, float32 [n], as a kernel reads them. exponents: uint8 [n], n a power of two"""
    scales = torch.empty(len(exponents), device=exponents.device)
    launch(_scales_kernel, (1,), exponents, scales, N=len(exponents), num_warps=1)
    return scales


def numbers_to_encode(encoding: Encoding) -> Tensor:
    """Returns float32: every code, midpoints between two, their neighbours on both sides, numbers without a code."""
    values = torch.arange(256, dtype=torch.uint8).view(encoding.dtype).float()
    values = values[values.isfinite()].unique()
    halves = (values[1:] + values[:-1]) / 2
    infinity = torch.tensor(float("inf"))
    largest = encoding.largest
    far = torch.tensor([0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-60, largest * 1.04, -largest * 1.07, 3e38, -3e38])
    near = [torch.nextafter(halves, sign * infinity) for sign in (-1, 1)]
    return torch.cat([values, halves, *near, far, infinity[None], -infinity[None]])
