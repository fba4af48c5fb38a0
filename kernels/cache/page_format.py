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

# Elements of a latent that share a scale in a record (records.py).
GROUP_ELEMENTS = 128


class FormatMismatch(ValueError):
    """Pages are in one format, and the code that would write, read, copy or adopt them is for another."""


class Encoding(enum.Enum):
    """The encoding of an element of a page: the name of its dtype in torch.

    Eight-bit encodings by the Open Compute Project's OFP8 specification (E4M3 without infinities, E5M2 with them), and
    E4M3FNUZ, which gfx942 computes in: the exponent's bias is 8 instead of 7, so that a code is worth half of its
    value in E4M3FN; 0x80 is its only NaN.
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
        """True if an element takes one byte, and a separate scale gives its value."""
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
    """The layout of a layer's keys and values in its pages.

    SPLIT:      K pages and V pages, each [tokens, kv_heads, dim]
    LATENT:     one row per token, whose first v_head_dim elements are V and all of which are K
    VECTORIZED: K pages and V pages, cut into vectors of 16 bytes in an order of their own (kernels/cache/page_rows.py)
    """

    SPLIT = "K and V pages"
    LATENT = "latent pages"
    VECTORIZED = "vectorised pages"


class Scales(enum.Enum):
    """The elements that share one float32 scale, of K and of V each; an element's value is its code times the scale.

    NONE:  there are no scales
    LAYER: [1]
    HEAD:  [kv_heads]
    TOKEN: [pages, kv_heads, page_size]; the store derives them from the rows that it writes
    GROUP: in the rows themselves, which are records (records.py); the store derives them
    """

    NONE = "no scales"
    LAYER = "a scale for each layer"
    HEAD = "a scale for each KV head"
    TOKEN = "a scale for each token and KV head"
    GROUP = "a scale for each 128 elements of a latent, in its record"

    @property
    def number(self) -> int:
        """The number of the value in a kernel's geometry, like `Encoding.number`."""
        return list(Scales).index(self)


# The kinds of scales that lie beside the rows.
SCALES_BESIDE_ROWS = tuple(each for each in Scales if each is not Scales.GROUP)


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
    """The content of a layer's pages, and its layout.

    encoding:                of an element
    kind:                    the layout
    page_size:               tokens in a page
    num_kv_heads:            rows of a token
    head_dim, v_head_dim:    elements of a K row and of a V row; in latent pages v_head_dim of the head_dim are V, and
                             the others are the part that is rotated
    scales:                  which elements share a scale
    producer:                who laid the pages out; another project's layout that is no PoolKind has its name here
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
        """The coding of an element."""
        return Coding(self.encoding.number, self.scales.number, self.num_kv_heads, self.page_size)

    @property
    def k_row(self) -> int:
        """Elements of the encoding that a row of the K pages takes: head_dim, or the bytes of a record."""
        if self.scales is not Scales.GROUP:
            return self.head_dim
        groups, rest = self.v_head_dim // GROUP_ELEMENTS, self.head_dim - self.v_head_dim
        return self.v_head_dim + groups * torch.float32.itemsize + rest * torch.bfloat16.itemsize

    @property
    def side_elements(self) -> tuple[int, int]:
        """Elements that a token takes in the K pages and in the V pages; V of latent pages is part of K."""
        v = 0 if self.kind is PoolKind.LATENT else self.v_head_dim
        return self.num_kv_heads * self.k_row, self.num_kv_heads * v

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: K, V, and the scales that belong to its tokens."""
        row_bytes = sum(self.side_elements) * self.encoding.dtype.itemsize
        scale_values = self.num_kv_heads * (1 if self.kind is PoolKind.LATENT else 2) * (self.scales is Scales.TOKEN)
        return self.page_size * (row_bytes + scale_values * torch.float32.itemsize)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the scales of K, and of V; those of tokens for one page. Empty if there are none beside rows."""
        shapes = {
            Scales.NONE: (),
            Scales.LAYER: (1,),
            Scales.HEAD: (self.num_kv_heads,),
            Scales.TOKEN: (self.num_kv_heads, self.page_size),
            Scales.GROUP: (),
        }
        return shapes[self.scales]
