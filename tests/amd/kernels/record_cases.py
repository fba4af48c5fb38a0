"""Pages of records as their formats define them, byte by byte: made at random, and read as float64, with no code of the
kernels.

GROUP, by vLLM's flashmla_sparse.py: a token has 512 codes (or another multiple of 128), a float32 scale for every 128
of them, then bfloat16 elements.

FOOTER, by FlashMLA's tests/quant.py (MODEL1_FP8Sparse) and vLLM's models/deepseek_v4/common/ops/cache_utils.py: a token
has 448 codes (or another multiple of 64) and 64 bfloat16 elements. After all tokens of a page come 8 bytes for each: a
power of two for every 64 codes, as its exponent plus 127. Pages begin at multiples of the bytes of a token before them.

Bytes that nothing may read are 0xff, which makes scales, rests and codes of E4M3FN NaN.
"""

import math
import struct
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rocm_attn.kernels.cache.page_format import Encoding, Scales

POISON = 0xFF
# Exponent bias and the codes that are NaN: OCP OFP8, and gfx942's E4M3FNUZ.
_BIASES = {Encoding.E4M3FN: 7, Encoding.E4M3FNUZ: 8}
_NANS = {Encoding.E4M3FN: (0x7F, 0xFF), Encoding.E4M3FNUZ: (0x80,)}


class RecordPages(NamedTuple):
    """Pages of records. dims: of a row, and of its first elements that are V; scales: GROUP or FOOTER"""

    dims: tuple[int, int]
    encoding: Encoding
    page_size: int
    scales: Scales = Scales.GROUP

    @property
    def has_footer(self) -> bool:
        return self.scales is Scales.FOOTER

    @property
    def group(self) -> int:
        return 64 if self.has_footer else 128

    @property
    def coded(self) -> int:
        return self.dims[1] - 64 if self.has_footer else self.dims[1]

    @property
    def groups(self) -> int:
        return self.coded // self.group

    @property
    def row_bytes(self) -> int:
        return self.coded + (0 if self.has_footer else 4 * self.groups) + 2 * (self.dims[0] - self.coded)

    @property
    def page_bytes(self) -> int:
        if not self.has_footer:
            return self.page_size * self.row_bytes
        return (self.page_size * (self.row_bytes + 8) + self.row_bytes - 1) // self.row_bytes * self.row_bytes

    def scales_at(self, offset: int) -> int:
        """Returns the place in a page of a token's first scale."""
        if self.has_footer:
            return self.page_size * self.row_bytes + 8 * offset
        return self.row_bytes * offset + self.coded

    def rest_at(self, offset: int) -> int:
        """Returns the place in a page of a token's first bfloat16 element."""
        return self.row_bytes * (offset + 1) - 2 * (self.dims[0] - self.coded)

    def random(self, read: Tensor, generator: torch.Generator, *, any_scale: bool) -> Tensor:
        """Returns pages of random finite numbers, uint8 [pages, page_bytes], and poison where they are not read.

        read:      bool [pages, page_size]
        any_scale: whether scales are any numbers, if the format has those; if not they are powers of two, with which
                   values are exact in bfloat16
        """
        shape = read.shape
        codes = torch.randint(0, 256, (*shape, self.coded), generator=generator, dtype=torch.uint8)
        for nan in _NANS[self.encoding]:
            codes[codes == nan] = 0x31
        scales = (torch.rand(*shape, self.groups, generator=generator) + 0.5) / 64
        if not any_scale:
            scales = torch.exp2(scales.log2().round())
        if self.has_footer:
            scales = torch.randint(119, 123, scales.shape, generator=generator, dtype=torch.uint8)
        rest = torch.randn(*shape, self.dims[0] - self.coded, generator=generator).bfloat16()
        pages = torch.full((len(read), self.page_bytes), POISON, dtype=torch.uint8)
        for page, offset in read.nonzero().tolist():
            for first, part in (
                (self.row_bytes * offset, codes),
                (self.scales_at(offset), scales.view(torch.uint8)),
                (self.rest_at(offset), rest.view(torch.uint8)),
            ):
                pages[page, first : first + part.shape[-1]] = part[page, offset]
        return pages

    def value(self, page: Tensor, offset: int) -> Tensor:
        """Returns the row of one token, float64 [head_dim]. page: uint8 [page_bytes]"""
        held, first = bytes(page.tolist()), self.row_bytes * offset
        if self.has_footer:
            exponents = struct.unpack_from(f"<{self.groups}B", held, self.scales_at(offset))
            scales = [math.nan if exponent == 255 else 2.0 ** (exponent - 127) for exponent in exponents]
        else:
            scales = list(struct.unpack_from(f"<{self.groups}f", held, self.scales_at(offset)))
        codes = held[first : first + self.coded]
        values = [_value_of_code(code, self.encoding) * scales[d // self.group] for d, code in enumerate(codes)]
        halves = struct.unpack_from(f"<{self.dims[0] - self.coded}H", held, self.rest_at(offset))
        # A bfloat16 is the upper half of a float32.
        rest = [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]
        return torch.tensor(values + rest, dtype=torch.float64)

    def of_row(self, row: Tensor) -> Tensor:
        """Returns a page that holds one row, its first, and otherwise poison, uint8 [page_bytes]."""
        page = torch.full((self.page_bytes,), POISON, dtype=torch.uint8)
        self.write(page, 0, row)
        return page

    def write(self, page: Tensor, offset: int, row: Tensor) -> None:
        """Writes a row by vLLM's formulas, 448 being 224 for E4M3FNUZ, whatever the page has held there.

        GROUP:  2 ** ceil(log2(max(largest / 448, 1e-4)))
        FOOTER: 2 ** ceil(log2(max(largest, 1e-4) / 448))
        """
        largest = 448.0 if self.encoding is Encoding.E4M3FN else 224.0
        values, codes, scales = row.double().tolist(), b"", b""
        for first in range(0, self.coded, self.group):
            group = values[first : first + self.group]
            most = max(map(abs, group))
            least = max(most, 1e-4 * largest / 448) / largest if self.has_footer else max(most / largest, 1e-4)
            exponent = math.ceil(math.log2(least))
            codes += bytes(code_of_value(value / 2.0**exponent, self.encoding) for value in group)
            scales += bytes([exponent + 127]) if self.has_footer else struct.pack("<f", 2.0**exponent)
        rest = row[self.coded :].bfloat16().view(torch.uint8).numpy().tobytes()
        for first, part in (
            (self.row_bytes * offset, codes),
            (self.scales_at(offset), scales),
            (self.rest_at(offset), rest),
        ):
            page[first : first + len(part)] = torch.tensor(list(part), dtype=torch.uint8)


def _value_of_code(code: int, encoding: Encoding) -> float:
    if code in _NANS[encoding]:
        return float("nan")
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = (mantissa / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - _BIASES[encoding])
    return -magnitude if code & 0x80 else magnitude


@cache
def _magnitudes(encoding: Encoding) -> list[tuple[float, int]]:
    """Returns the value of each code that is not negative, and the code."""
    return [(_value_of_code(code, encoding), code) for code in range(0x80) if code not in _NANS[encoding]]


def code_of_value(value: float, encoding: Encoding) -> int:
    """Returns the code nearest to a value, the even one of two, the largest of larger values; no -0 in E4M3FNUZ."""
    nearest = min(_magnitudes(encoding), key=lambda each: (abs(abs(value) - each[0]), each[1] & 1))[1]
    is_negative = math.copysign(1.0, value) < 0 and not (nearest == 0 and encoding is Encoding.E4M3FNUZ)
    return nearest | 0x80 * is_negative
