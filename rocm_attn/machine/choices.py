"""The names that options take.

Here and not beside what they name, because the command line shows them without importing torch.
"""

from __future__ import annotations

from typing import Literal

# What stands for a provider, a page size or a layout of pages that is to be chosen.
AUTO: Literal["auto"] = "auto"
PROVIDERS = (AUTO, "torch", "triton", "aiter")
# Of q, k, v, the KV cache and the output.
DTYPES = ("bfloat16", "float16", "float32")
# How K and V lie in pages, for layers that are not latent.
POOLS = ("linear", "vectorized", AUTO)
