"""Records: latent rows in eight bits, each with its scales and with its rotated part in bfloat16.

    bytes of a token's record, for a row of 512 elements of V and 64 after them:

    0                       512                528                 656
    | 512 codes             | 4 float32 scales | 64 bfloat16       |

Element d of V is code d times scale d // 128; the elements after V have no scale. A scale may be any float32. The store
makes powers of two, so that a value is exact in bfloat16, as the readers of FlashMLA need it. FlashMLA and vLLM call
these pages fp8_ds_mla (vLLM: flashmla_sparse.py, concat_and_cache_ds_mla; its pull request 49435 has the scales).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rocm_attn.kernels.cache.page_format import GROUP_ELEMENTS, Encoding, PageFormat

# The smallest scale: vLLM's stores round 1e-4 up to a power of two.
SMALLEST_GROUP_SCALE = 2.0**-13
# The code of the largest element of a group at most. E4M3FNUZ would reach 240, and vLLM's stores stop at 224.
LARGEST_OF_GROUP = {Encoding.E4M3FN.number: 448.0, Encoding.E4M3FNUZ.number: 224.0}


class RecordParts(NamedTuple):
    """Views of records [..., record bytes]: codes, uint8; scales, float32; the elements after V, bfloat16."""

    codes: Tensor
    scales: Tensor
    rest: Tensor

    @classmethod
    def of(cls, records: Tensor, form: PageFormat) -> RecordParts:
        """The parts of records, uint8 [..., record bytes]; addresses and strides are multiples of 4 bytes."""
        first_rest = form.v_head_dim + form.v_head_dim // GROUP_ELEMENTS * torch.float32.itemsize
        scales = records[..., form.v_head_dim : first_rest].view(torch.float32)
        return cls(records[..., : form.v_head_dim], scales, records[..., first_rest:].view(torch.bfloat16))

    def values(self, encoding: Encoding) -> Tensor:
        """The rows as float32 [..., head_dim]: codes times their scales, and the elements after V."""
        groups = self.codes.view(encoding.dtype).float().unflatten(-1, (-1, GROUP_ELEMENTS))
        return torch.cat(((groups * self.scales[..., None]).flatten(-2), self.rest.float()), -1)


def records_of(rows: Tensor, form: PageFormat) -> Tensor:
    """Finite rows [..., head_dim] as records, uint8 [..., record bytes]."""
    records = torch.empty(*rows.shape[:-1], form.k_row, dtype=torch.uint8, device=rows.device)
    parts, largest = RecordParts.of(records, form), LARGEST_OF_GROUP[form.encoding.number]
    v, rest = rows.split((form.v_head_dim, form.head_dim - form.v_head_dim), -1)
    groups = v.float().unflatten(-1, (-1, GROUP_ELEMENTS))
    # The next power of two, by the bits of float32: an exponent is one more unless the mantissa is 0.
    bits = (groups.abs().amax(-1) / largest).clamp(min=SMALLEST_GROUP_SCALE).view(torch.int32)
    scales = ((bits + 0x7FFFFF) >> 23 << 23).view(torch.float32)
    parts.codes.copy_((groups / scales[..., None]).flatten(-2).to(form.encoding.dtype).view(torch.uint8))
    parts.scales.copy_(scales)
    parts.rest.copy_(rest)
    return records
