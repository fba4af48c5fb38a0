"""The names that options take.

They are in this module, not next to the things that they name, as the command line shows them without torch.
"""

from typing import Literal

# Stands for a provider, a page size or a layout of pages that is chosen automatically.
AUTO: Literal["auto"] = "auto"
PROVIDERS = (AUTO, "cpu", "torch", "triton", "aiter")
# Tokens of a page that engines take if nothing else is said.
DEFAULT_PAGE_SIZE = 16
# The share of a GPU's memory that may be in use.
USED_SHARE = 0.9
# Dtypes of q, k, v, the output, and the KV cache if it has no encoding of its own.
DTYPES = ("bfloat16", "float16", "float32")
# Encodings of K and V in the KV cache: like q, in the eight bits that the GPU's matrix units read, or in given ones.
KV_DTYPES = (AUTO, "fp8", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2")
# The groups of elements that share a scale of eight-bit K and V.
KV_SCALES = (AUTO, "layer", "head", "token", "group", "footer")
# Layouts of K and V in pages, for layers that are not latent.
POOLS = ("linear", "vectorized", AUTO)
