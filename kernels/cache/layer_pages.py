"""LayerPages: one layer's K and V storage, which the store, attention and all fix-ups take whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rocm_attn.kernels.cache.page_format import Coding, Encoding, FormatMismatch, PageFormat, PoolKind, Scales
from rocm_attn.kernels.cache.page_rows import PageRows, key_rows, value_rows
from rocm_attn.kernels.cache.records import RecordParts

# Tokens and heads of a page are near if they lie fewer elements apart than this: 1024 of them end within 2 GiB.
NEAR = 1 << 20

# A code that is NaN, for every eight-bit encoding: E4M3FNUZ has no other one.
_NAN_CODES = {Encoding.E4M3FN: 0x7F, Encoding.E4M3FNUZ: 0x80, Encoding.E5M2: 0x7F}
# Bytes of records that make their scales and their rest NaN.
_NAN_RECORD = 0xFF


def has_even_slots(k: Tensor, v: Tensor) -> bool:
    """True if all slots of a layer lie at equal distances, so that a slot is a row of a matrix, as TMA reads them.

    Pages of K and of V are as many slots apart, and slots have 31 bits. Rows begin at multiples of 16 bytes, except in
    contiguous pages, where a kernel's limits on dims say it.
    k, v: pages, as in LayerPages
    """
    sides = k, v
    if k.dim() == 5 or any(side.stride(1) <= 0 or side.stride(0) % side.stride(1) for side in sides):
        return False
    page_slots = {side.stride(0) // side.stride(1) for side in sides}
    aligned = all(number * side.itemsize % 16 == 0 for side in sides for number in side.stride()[1:3])
    few = len(k) * max(page_slots) < 1 << 31
    return len(page_slots) == 1 and few and (aligned or all(side.is_contiguous() for side in sides))


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's storage.

    k:                [pages, page_size, kv_heads, head_dim]
    v:                [pages, page_size, kv_heads, v_head_dim]; in a latent layer the first v_head_dim elements of each
                      row of k
    format:           the format of the pages
    k_scale, v_scale: float32 scales of K and of V, as format.scales says: [1], [kv_heads] or [pages, kv_heads,
                      page_size], contiguous; None if there are none. In a latent layer v_scale is k_scale
    raw_k, raw_v:     k and v as memory, for launches, writes and copies: uint8 if elements are codes, because few
                      operations and not all of Triton's targets know the dtypes of eight bits
    keys, values:     raw_k and raw_v, token by token
    coding:           the format's
    is_near:          whether a token of a page and the next one, and a head and the next one, are less than 2^20
                      elements apart
    page_slots:       slots from a page to the next one in memory, if has_even_slots(k, v): more than page_size if
                      others lie between; else 0
    record:           the parts of each token's record; None if rows are no records
    k and v have another shape in a vectorised pool (page_rows.py); pages come first in any. A row of k that is a record
    has its bytes (records.py), at addresses that are multiples of 4; a page's footer follows its rows, outside of k.

    Raises FormatMismatch if tensors do not have this format.
    """

    k: Tensor
    v: Tensor
    format: PageFormat
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    raw_k: Tensor = field(init=False, repr=False, compare=False)
    raw_v: Tensor = field(init=False, repr=False, compare=False)
    keys: PageRows = field(init=False, repr=False, compare=False)
    values: PageRows = field(init=False, repr=False, compare=False)
    coding: Coding = field(init=False, repr=False, compare=False)
    is_near: bool = field(init=False, repr=False, compare=False)
    page_slots: int = field(init=False, repr=False, compare=False)
    record: RecordParts | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self)
        is_fp8 = self.format.encoding.is_fp8
        raw_k, raw_v = (side.view(torch.uint8) if is_fp8 else side for side in (self.k, self.v))
        # Made once: a launch needs them for every layer of every step.
        made = {"raw_k": raw_k, "raw_v": raw_v, "keys": key_rows(raw_k), "values": value_rows(raw_v)}
        near = max(*raw_k.stride()[1:], *raw_v.stride()[1:]) < NEAR
        record = None if self.format.record is None else RecordParts.of_pages(raw_k, self.format)
        made |= {"coding": self.format.coding, "is_near": near, "record": record}
        made["page_slots"] = raw_k.stride(0) // raw_k.stride(1) if has_even_slots(raw_k, raw_v) else 0
        for name, value in made.items():
            object.__setattr__(self, name, value)

    @property
    def has_aligned_sides(self) -> bool:
        """True if K and V begin at multiples of 16 bytes: TMA, and copies of 16 bytes, read no others."""
        return self.raw_k.data_ptr() % 16 == 0 == self.raw_v.data_ptr() % 16

    @property
    def has_aligned_rows(self) -> bool:
        """True if rows of K and of V begin at multiples of 16 elements, near the others of their page (is_near).

        Triton loads others element by element, or word by word.
        """
        sides = self.raw_k, self.raw_v
        numbers = (number for side in sides for number in (side.data_ptr() // side.itemsize, *side.stride()[:3]))
        return self.is_near and not any(number % 16 for number in numbers)

    @classmethod
    def plain(cls, k: Tensor, v: Tensor, *, kind: PoolKind = PoolKind.SPLIT) -> LayerPages:
        """Pages without scales, with the format that the tensors show. kind: SPLIT even if the pages are cut"""
        keys, values = key_rows(k), value_rows(v)
        form = PageFormat(
            Encoding.of(k.dtype),
            PoolKind.VECTORIZED if k.dim() == 5 else kind,
            keys.page_size,
            keys.num_heads,
            keys.dim,
            values.dim,
        )
        return cls(k, v, form)

    @classmethod
    def latent(cls, memory: Tensor, form: PageFormat, scale: Tensor | None = None) -> LayerPages:
        """Latent pages in memory. memory: [pages, form.line], rows first, and then the footer; scale: of K and of V"""
        k = memory[:, : form.page_size * form.k_row].unflatten(1, (form.page_size, 1, form.k_row))
        return cls(k, k[..., : form.v_head_dim], form, scale, scale)

    @property
    def lines(self) -> tuple[Tensor, ...]:
        """The memory of pages: tensors in whose lines, page after page, lies all that belongs to a page."""
        form, k = self.format, self.raw_k
        if form.record is not None and form.record.footer:
            return (k.as_strided((len(k), form.page_size * (form.k_row + form.record.footer)), (k.stride(0), 1)),)
        sides = ((k, self.k_scale), (self.raw_v, self.v_scale))[: 1 if form.kind is PoolKind.LATENT else 2]
        of_tokens = (scale for _, scale in sides if form.scales is Scales.TOKEN and scale is not None)
        return *(side for side, _ in sides), *of_tokens

    def of_page(self, page: int) -> tuple[Tensor, ...]:
        """All that belongs to a page, in the memory of the pages."""
        return tuple(line[page] for line in self.lines)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that kernels are launched with, by name."""
        named = {"k_pages": self.raw_k, "v_pages": self.raw_v, "k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def read(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """The values of whole pages: copies of K and V, [n, page_size, kv_heads, head_dim | v_head_dim].

        pages: integer [n]
        Eight-bit pages give float32, codes times their scales; other elements stay unchanged.
        """
        k, v = self.read_sides(pages)
        return k, v

    def read_sides(self, pages: Tensor) -> Iterator[Tensor]:
        """Does the same as `read`, but reads K before V, so that both are never copied at the same time."""
        if self.record is not None:
            k = self.record.at(pages).values(self.format.encoding)
            yield k
            yield k[..., : self.format.v_head_dim]
            return
        for rows, scale in ((self.keys, self.k_scale), (self.values, self.v_scale)):
            yield self._worth(rows.read(pages), scale, (pages,))

    def read_tokens(self, page: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """The values of tokens of linear pages, like read(): copies, [..., kv_heads, head_dim | v_head_dim].

        page, offset: integer [...], a token's page and its place there
        """
        if self.record is not None:
            k = self.read_keys(page, offset)
            return k, k[..., : self.format.v_head_dim]
        sides = (self.raw_k, self.k_scale), (self.raw_v, self.v_scale)
        k, v = (self._worth(raw[page, offset], scale, (page, offset)) for raw, scale in sides)
        return k, v

    def read_keys(self, page: Tensor, offset: Tensor) -> Tensor:
        """Does the same as `read_tokens`, for K alone."""
        if self.record is not None:
            return self.record.at(page, offset).values(self.format.encoding)
        return self._worth(self.raw_k[page, offset], self.k_scale, (page, offset))

    def fill_nan(self, pages: Tensor | slice) -> None:
        """Makes every element of some pages NaN, scales of tokens too."""
        nan = _NAN_RECORD if self.record is not None else _NAN_CODES.get(self.format.encoding, float("nan"))
        for line in self.lines:
            line[pages] = nan if line.dtype == self.raw_k.dtype else float("nan")

    def _worth(self, raw: Tensor, scale: Tensor | None, at: tuple[Tensor, ...]) -> Tensor:
        if not self.format.encoding.is_fp8:
            return raw
        numbers = raw.view(self.format.encoding.dtype).float()
        if scale is None:
            return numbers
        if self.format.scales is Scales.TOKEN:
            scale = scale.transpose(1, 2)[at]
        # [1] and [kv_heads] stretch over pages and tokens.
        return numbers * scale[..., None]


def _check(pages: LayerPages) -> None:
    form = pages.format
    for name, elements, rows, dim in (
        ("k", pages.k, key_rows(pages.k), form.k_row),
        ("v", pages.v, value_rows(pages.v), form.v_head_dim),
    ):
        if elements.dtype != form.encoding.dtype:
            raise FormatMismatch(f"{name} is {elements.dtype}; its pages are {form}")
        if (elements.dim() == 5) != (form.kind is PoolKind.VECTORIZED):
            raise FormatMismatch(f"{name} has {elements.dim()} dimensions; its pages are {form}")
        found, wanted = (rows.page_size, rows.num_heads, rows.dim), (form.page_size, form.num_kv_heads, dim)
        if found != wanted:
            raise FormatMismatch(
                f"{name} has pages of {found[0]} tokens, {found[1]} heads and {found[2]} elements; its pages are {form}"
            )
    if form.record is not None:
        _check_records(pages.k, form)
    by_page = (len(pages.k),) if form.scales is Scales.TOKEN else ()
    for name, scale in (("k_scale", pages.k_scale), ("v_scale", pages.v_scale)):
        if not form.scale_shape:
            if scale is not None:
                raise FormatMismatch(f"{name} was given; its pages are {form}")
            continue
        shape = (*by_page, *form.scale_shape)
        if scale is None or scale.dtype != torch.float32 or scale.shape != shape or not scale.is_contiguous():
            given = "missing" if scale is None else f"{scale.dtype} {list(scale.shape)}, strides {scale.stride()}"
            raise FormatMismatch(
                f"{name} is {given}; it must be float32 {list(shape)} and contiguous, because pages are {form}"
            )


def _check_records(k: Tensor, form: PageFormat) -> None:
    if any(number % 4 for number in (k.data_ptr(), *k.stride()[:3])):
        raise FormatMismatch(
            f"k begins at {k.data_ptr():#x} and has strides {k.stride()}; records begin at multiples of 4 "
            f"bytes, because pages are {form}"
        )
    assert form.record is not None
    footer = form.page_size * (form.k_row + form.record.footer)
    last = k.storage_offset() + (len(k) - 1) * k.stride(0) + footer
    if form.record.footer and (
        k.stride(1) != form.k_row or k.stride(0) < footer or last > k.untyped_storage().nbytes()
    ):
        raise FormatMismatch(
            f"k has strides {k.stride()} in {k.untyped_storage().nbytes()} bytes of memory; rows of {form.k_row} bytes "
            f"lie next to each other, and each page has {footer} bytes for them and its footer, because pages are "
            f"{form}"
        )
