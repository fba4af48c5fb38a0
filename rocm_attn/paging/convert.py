"""Tables that convert codes of one eight-bit encoding to another, for KV that comes from another kind of GPU.

A code of the source becomes the target's nearest code of code * source scale / target scale. The conversion from E4M3FN
to E4M3FNUZ loses nothing if the target's scale is twice the source's: the same bits have half the value in E4M3FNUZ, so
every code of E4M3FN then has its equal. In the other direction, with half the scale, 240 has no equal: it becomes 448,
which stands for 224. So scales of tokens, whose largest element has the largest code, change by token_factor().
"""

import math

import torch
from torch import Tensor

from rocm_attn.kernels.cache.page_format import Encoding

# Factors of scales, by which codes keep their bits.
KEEPING_BITS = {(Encoding.E4M3FN, Encoding.E4M3FNUZ): 2.0, (Encoding.E4M3FNUZ, Encoding.E4M3FN): 0.5}


def token_factor(source: Encoding, target: Encoding) -> float:
    """The factor of scales of tokens: the smallest power of two with which the source's largest code fits."""
    return 2.0 ** math.ceil(math.log2(source.largest / target.largest))


def code_tables(source: Encoding, target: Encoding, ratio: Tensor) -> tuple[Tensor, bool]:
    """New codes, uint8 [heads, 256], and whether each number keeps its value. NaN and infinity become 0.

    ratio: float64 [heads], or [1] for all heads
    """
    numbers = torch.arange(256, dtype=torch.uint8).view(source.dtype).double()
    exact = numbers * ratio.cpu()[:, None]
    exact = exact.where(exact.isfinite(), 0.0)
    kept = exact.clamp(-target.largest, target.largest)
    # Through float32, which never rounds a product to the other side of a code boundary: codes have at most 4 bits.
    codes = kept.float().to(target.dtype)
    return codes.view(torch.uint8).to(ratio.device), torch.equal(codes.double(), exact)
