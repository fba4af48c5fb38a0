"""Records: latent rows in eight bits, each with scales of its own and with its rotated part in bfloat16.

    Scales.GROUP, bytes of a token's record, for a row of 512 elements of V and 64 after them:

    0                       512                528                 656
    | 512 codes             | 4 float32 scales | 64 bfloat16       |

    Scales.FOOTER, bytes of a page of P tokens, for rows of 512 elements, all of which are V:

    0                                          576 P                                      584 P
    | for each token: 448 codes, 64 bfloat16   | for each token: 7 exponents and a pad    | padding to a whole row

Element d of the codes is code d times scale d // group. An exponent e is the scale 2^(e - 127), and 255 is NaN: UE8M0
of the OCP's specification of microscaling formats. FlashMLA and vLLM call the pages of both kinds fp8_ds_mla: the first
are DeepSeek-V3.2's (vLLM: flashmla_sparse.py, concat_and_cache_ds_mla; its pull request 49435 has the scales), the
second DeepSeek-V4's (FlashMLA: tests/quant.py, MODEL1_FP8Sparse; vLLM: models/deepseek_v4/common/ops/cache_utils.py).

A scale of the first may be any float32. The store makes powers of two, so that a value is exact in bfloat16, as the
readers of FlashMLA need it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rocm_attn.kernels.cache.page_format import Encoding, PageFormat

# The code of the largest element of a group at most. E4M3FNUZ would reach 240, and vLLM's stores stop at 224.
LARGEST_OF_GROUP = {Encoding.E4M3FN.number: 448.0, Encoding.E4M3FNUZ.number: 224.0}


class RecordParts(NamedTuple):
    """The parts of records: codes, uint8; scales, float32 or uint8 exponents; the rest, bfloat16.

    Those of pages are views [pages, page_size, 1, elements], those of rows tensors [..., elements].
    """

    codes: Tensor
    scales: Tensor
    rest: Tensor

    @classmethod
    def of_pages(cls, raw: Tensor, form: PageFormat) -> RecordParts:
        """The parts of pages, uint8 [pages, page_size, 1, record bytes]; of footers, which follow the rows, too."""
        layout = form.record
        assert layout is not None
        codes, rest = raw[..., : form.coded], raw[..., form.k_row - 2 * (form.head_dim - form.coded) :]
        if layout.footer:
            shape = *raw.shape[:3], form.coded // layout.group
            strides = raw.stride(0), layout.footer, layout.footer, 1
            scales = raw.as_strided(shape, strides, raw.storage_offset() + form.page_size * form.k_row)
        else:
            scales = raw[..., form.coded : form.k_row - rest.shape[-1]].view(layout.scale_dtype)
        return cls(codes, scales, rest.view(torch.bfloat16))

    @classmethod
    def of_rows(cls, rows: Tensor, form: PageFormat) -> RecordParts:
        """Makes the parts of finite rows [..., head_dim]."""
        layout, largest = form.record, LARGEST_OF_GROUP[form.encoding.number]
        assert layout is not None
        coded, rest = rows.split((form.coded, form.head_dim - form.coded), -1)
        groups = coded.float().unflatten(-1, (-1, layout.group))
        # The next power of two, by the bits of float32: an exponent is one more unless the mantissa is 0.
        bits = (groups.abs().amax(-1) / largest).clamp(min=layout.smallest_scale).view(torch.int32)
        exponent = (bits + 0x7FFFFF) >> 23
        scales = (exponent << 23).view(torch.float32)
        codes = (groups / scales[..., None]).flatten(-2).to(form.encoding.dtype).view(torch.uint8)
        return cls(codes, scales if layout.scale_dtype == torch.float32 else exponent.to(torch.uint8), rest.bfloat16())

    def at(self, *index: Tensor) -> RecordParts:
        """Copies of the parts at an index of pages, or of pages and places in them."""
        codes, scales, rest = (part[index] for part in self)
        return RecordParts(codes, scales, rest)

    def put(self, index: tuple[Tensor, ...], rows: RecordParts) -> None:
        """Writes parts of rows there."""
        for part, given in zip(self, rows, strict=True):
            part[index] = given

    def values(self, encoding: Encoding) -> Tensor:
        """The rows as float32 [..., head_dim]: codes times their scales, and the rest."""
        scales = self.scales
        if scales.dtype == torch.uint8:
            # The exponent's place in float32; 2^-127 lies below its normal numbers.
            bits = torch.where(scales == 0, 1 << 22, scales.int() << 23)
            scales = bits.view(torch.float32).masked_fill(scales == 255, float("nan"))
        groups = self.codes.view(encoding.dtype).float().unflatten(-1, (scales.shape[-1], -1))
        return torch.cat(((groups * scales[..., None]).flatten(-2), self.rest.float()), -1)
