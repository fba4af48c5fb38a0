"""The names that options take.

Here and not beside what they name, because the command line shows them without importing torch.
"""

from __future__ import annotations

from typing import Literal

# What stands for a provider, a page size or a layout of pages that is to be chosen.
AUTO: Literal["auto"] = "auto"
PROVIDERS = (AUTO, "torch", "triton", "aiter")
# Of q, k, v, the output, and the KV cache where it takes no encoding of its own.
DTYPES = ("bfloat16", "float16", "float32")
# How K and V are encoded in the KV cache: as q, in the eight bits that the GPU's matrix units read, or in given ones.
KV_DTYPES = (AUTO, "fp8", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2")
# What shares a factor of eight-bit K and V.
KV_SCALES = (AUTO, "layer", "head", "token")
# How K and V lie in pages, for layers that are not latent.
POOLS = ("linear", "vectorized", AUTO)
