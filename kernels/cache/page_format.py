"""PageFormat: the format of a layer's pages, as one hashable value.

All code that writes, reads, copies or adopts pages is checked against it: pages that were written in one encoding or
layout and read in another give finite, wrong results, which nothing else detects.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch

# The producer of pages laid out as page_rows.py says.
OWN_PRODUCER = "rocm_attn"


class FormatMismatch(ValueError):
    """Pages are in one format, and the code that would write, read, copy or adopt them is for another."""


class Encoding(enum.Enum):
    """The encoding of one element of a page. The value is the name of its dtype in torch.

    E4M3FN and E5M2 are those of the Open Compute Project's OFP8 specification: E4M3 has no infinities, E5M2 has them.
    gfx942 computes in E4M3FNUZ: its exponent bias is 8 instead of 7, so a code has half of its value in E4M3FN, and
    0x80 is its only NaN.
    """

    BF16 = "bfloat16"
    FP16 = "float16"
    FP32 = "float32"
    E4M3FN = "float8_e4m3fn"
    E4M3FNUZ = "float8_e4m3fnuz"
    E5M2 = "float8_e5m2"

    @property
    def dtype(self) -> torch.dtype:
        """The encoding's dtype in torch."""
        dtype: torch.dtype = getattr(torch, self.value)
        return dtype

    @property
    def number(self) -> int:
        """The number of the encoding in a kernel's geometry: Triton 3.6 passes no tuple with a string to a function."""
        return list(Encoding).index(self)

    @property
    def is_fp8(self) -> bool:
        """True if an element takes one byte; its value is then code * scale."""
        return self.dtype.itemsize == 1

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return torch.finfo(self.dtype).max

    @classmethod
    def of(cls, dtype: torch.dtype) -> Encoding:
        """The encoding of elements of a dtype. Raises ValueError for one that pages do not have."""
        return cls(str(dtype).removeprefix("torch."))


class PoolKind(enum.Enum):
    """The layout of K and V in a layer's pages.

    SPLIT:      K pages and V pages, each [tokens, kv_heads, dim]
    LATENT:     one row per token, whose first v_head_dim elements are V and all of which are K
    VECTORIZED: K pages and V pages, cut into vectors of 16 bytes in an order of their own (kernels/cache/page_rows.py)
    """

    SPLIT = "K and V pages"
    LATENT = "latent pages"
    VECTORIZED = "vectorised pages"


class Scales(enum.Enum):
    """Which elements share one scale, for K and V separately; an element's value is its code times the scale.

    NONE:  there are no scales
    LAYER: float32 [1]
    HEAD:  float32 [kv_heads]
    TOKEN: float32 [pages, kv_heads, page_size]; the store computes them from the rows that it writes
    GROUP, FOOTER: scales within the pages, whose rows are packed records (records.py); the store computes them
    """

    NONE = "no scales"
    LAYER = "a scale for each layer"
    HEAD = "a scale for each KV head"
    TOKEN = "a scale for each token and KV head"
    GROUP = "a scale for each 128 elements of a latent, in its record"
    FOOTER = "a power of two for each 64 elements of a latent, after the rows of its page"

    @property
    def number(self) -> int:
        """The number of the value in a kernel's geometry, like `Encoding.number`."""
        return list(Scales).index(self)


class RecordLayout(NamedTuple):
    """A way to keep a latent as a record: codes in groups, each with a scale, then a rest in bfloat16.

    group:          codes that share a scale
    plain_of_v:     elements at the end of V that belong to the rest, as all elements after V do
    scale_dtype:    of a scale: float32, or uint8, which is the exponent of a power of two, plus 127 (UE8M0)
    footer:         bytes of a token's scales in the page's footer, after its rows, unused ones included; 0: the scales
                    lie between the codes and the rest
    smallest_scale: the least scale that the store makes, a power of two
    """

    group: int
    plain_of_v: int
    scale_dtype: torch.dtype
    footer: int
    smallest_scale: float


# By vLLM's stores: the first round 1e-4 up to a power of two, the second 1e-4 / 448. Sources: records.py
RECORDS = {
    Scales.GROUP: RecordLayout(128, 0, torch.float32, 0, 2.0**-13),
    Scales.FOOTER: RecordLayout(64, 64, torch.uint8, 8, 2.0**-22),
}

# The kinds of scales that are not in the rows.
SCALES_BESIDE_ROWS = tuple(each for each in Scales if each not in RECORDS)


class Coding(NamedTuple):
    """The encoding of K and V, as kernels are compiled for it.

    ENCODING:  Encoding's number
    SCALES:    Scales' number
    KV_HEADS:  KV heads, each of which may have a scale per token
    PAGE_SIZE: tokens of a page
    """

    ENCODING: int
    SCALES: int
    KV_HEADS: int
    PAGE_SIZE: int


@dataclass(frozen=True, slots=True)
class PageFormat:
    """The encoding and the layout of a layer's pages. Pages of unequal formats must not be mixed.

    encoding:                encoding of an element
    kind:                    layout of K and V
    page_size:               tokens in a page
    num_kv_heads:            rows of a token
    head_dim, v_head_dim:    elements of a K row and of a V row. In latent pages, the first v_head_dim elements are V,
                             and the others have the rotary embedding
    scales:                  which elements share a scale
    producer:                the project that defines the layout, if it is no PoolKind of this one
    """

    encoding: Encoding
    kind: PoolKind
    page_size: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scales: Scales = Scales.NONE
    producer: str = OWN_PRODUCER

    def __str__(self) -> str:
        dims = f"{self.num_kv_heads} x {self.head_dim}/{self.v_head_dim}"
        return (
            f"{self.kind.value} of {self.page_size} tokens, {dims}, in {self.encoding.value} with {self.scales.value}, "
            f"laid out by {self.producer}"
        )

    @property
    def coding(self) -> Coding:
        """The encoding, scales, KV heads and page size, in the form that kernels are compiled for."""
        return Coding(self.encoding.number, self.scales.number, self.num_kv_heads, self.page_size)

    @property
    def record(self) -> RecordLayout | None:
        """The layout of packed records; None if the rows are plain."""
        return RECORDS.get(self.scales)

    @property
    def coded(self) -> int:
        """Elements of a K row that have scales: in a record those in groups, in other eight-bit pages all."""
        return self.head_dim if self.record is None else self.v_head_dim - self.record.plain_of_v

    @property
    def k_row(self) -> int:
        """Size of a row of the K pages, in elements of the encoding: head_dim, or the bytes of a record."""
        record = self.record
        if record is None:
            return self.head_dim
        scales = 0 if record.footer else self.coded // record.group * record.scale_dtype.itemsize
        return self.coded + scales + (self.head_dim - self.coded) * torch.bfloat16.itemsize

    @property
    def scales_nearer(self) -> int:
        """Bytes by which the scales of neighbouring records are nearer to each other than the records are."""
        return self.k_row - self.record.footer if self.record is not None and self.record.footer else 0

    @property
    def side_elements(self) -> tuple[int, int]:
        """Elements of a token in the K pages and in the V pages. In latent pages V is part of K, so its size is 0."""
        v = 0 if self.kind is PoolKind.LATENT else self.v_head_dim
        return self.num_kv_heads * self.k_row, self.num_kv_heads * v

    @property
    def line(self) -> int:
        """Elements from one page of K to the next: those of its rows; with a footer, as many whole rows as hold both.

        FlashMLA finds the row of a token without its page, in multiples of a row from the first one.
        """
        footer = 0 if self.record is None else self.page_size * self.record.footer
        rows = self.page_size + -(-footer // self.k_row)
        return rows * self.num_kv_heads * self.k_row

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: K, V, and the scales that belong to its tokens."""
        elements = self.line + self.page_size * self.side_elements[1]
        scale_values = self.num_kv_heads * (1 if self.kind is PoolKind.LATENT else 2) * (self.scales is Scales.TOKEN)
        return elements * self.encoding.dtype.itemsize + self.page_size * scale_values * torch.float32.itemsize

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of K's scales, and of V's; with TOKEN, for one page. Empty if no separate tensor holds scales."""
        shapes: dict[Scales, tuple[int, ...]] = {
            Scales.LAYER: (1,),
            Scales.HEAD: (self.num_kv_heads,),
            Scales.TOKEN: (self.num_kv_heads, self.page_size),
        }
        return shapes.get(self.scales, ())
