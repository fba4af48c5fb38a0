"""convert_pages: converts eight-bit pages to another encoding, for KV that was computed on another kind of GPU.

A code of the source becomes the target's nearest code of code * source scale / target scale: a table of 256 codes for
each KV head. The conversion from E4M3FN to E4M3FNUZ loses nothing if the target's scale is twice the source's: the same
bits have half the value in E4M3FNUZ, so every code of E4M3FN then has its equal. In the other direction, with half the
scale, 240 has no equal: it becomes 448, which stands for 224.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import Encoding, PoolKind, Scales
from rocm_attn.paging.index_spaces import RESERVED_PAGE

# Pages whose codes are looked up at a time, as 64-bit integers.
_PAGES_AT_A_TIME = 256
# Factors of scales that are computed here, those of tokens, so that codes keep their bits.
KEEPING_BITS = {(Encoding.E4M3FN, Encoding.E4M3FNUZ): 2.0, (Encoding.E4M3FNUZ, Encoding.E4M3FN): 0.5}


@dataclass(frozen=True, slots=True)
class Conversion:
    """The changes of a conversion, in elements of K and V.

    saturated:   exceeded the largest number of the target, and became that
    rounded:     have no exact code in the target, and became the nearest
    not_numbers: were NaN or infinite, and became 0
    """

    saturated: int
    rounded: int
    not_numbers: int

    @property
    def is_exact(self) -> bool:
        """True if no element has changed its value."""
        return not (self.saturated or self.rounded or self.not_numbers)


def convert_pages(source: LayerPages, target: LayerPages, source_pages: Tensor, target_pages: Tensor) -> Conversion:
    """Writes source_pages of one layer to target_pages of another pool of it, in the target's encoding.

    source, target: eight-bit pages of equal layout, page size, heads, dims and kind of scale, on one device
    source_pages, target_pages: int64 [n] on that device; target pages are distinct and not page 0. Within one pool, no
                                source page is a target page
    Scales of tokens are written so that as many codes as possible keep their bits; other scales are the target's own.

    Waits for the device. Raises BadTensor; nothing was written then.
    """
    _check(source, target, source_pages, target_pages)
    found = torch.zeros(3, dtype=torch.int64, device=source.k.device)
    sides = [(source.raw_k, target.raw_k, source.k_scale, target.k_scale)]
    if source.format.kind is not PoolKind.LATENT:
        sides.append((source.raw_v, target.raw_v, source.v_scale, target.v_scale))
    for codes, converted, given, own in sides:
        assert given is not None
        assert own is not None
        ratio = given.double() / own.double()
        if source.format.scales is Scales.TOKEN:
            by = KEEPING_BITS.get((source.format.encoding, target.format.encoding), 1.0)
            own[target_pages] = given[source_pages] * by
            ratio = torch.full((1,), 1.0 / by, dtype=torch.float64, device=given.device)
        new_code, change = code_tables(source.format.encoding, target.format.encoding, ratio)
        head_axis = 1 if source.format.kind is PoolKind.VECTORIZED else 2
        heads = torch.arange(len(new_code), device=codes.device)
        head = heads.view([-1 if axis == head_axis else 1 for axis in range(codes.dim())])
        for first in range(0, len(source_pages), _PAGES_AT_A_TIME):
            some = slice(first, first + _PAGES_AT_A_TIME)
            picked = codes.index_select(0, source_pages[some]).long()
            converted[target_pages[some]] = new_code[head, picked]
            found += torch.bincount(change[head, picked].flatten(), minlength=4)[1:]
    return Conversion(*found.tolist())


def code_tables(source: Encoding, target: Encoding, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """New codes, uint8 [heads, 256], and int64 [heads, 256]: 1, 2 or 3 if one saturates, rounds or is not finite.

    ratio: float64 [heads], or [1] for all heads
    """
    numbers = torch.arange(256, dtype=torch.uint8).view(source.dtype).double()
    exact = numbers * ratio.cpu()[:, None]
    is_number = exact.isfinite()
    exact = exact.where(is_number, 0.0)
    kept = exact.clamp(-target.largest, target.largest)
    # Through float32, which never rounds a product to the other side of a code boundary: codes have at most 4 bits.
    codes = kept.float().to(target.dtype)
    change = torch.where(codes.double() != exact, 2, 0)
    change = torch.where(exact.abs() > target.largest, 1, change)
    change = torch.where(is_number, change, 3)
    return codes.view(torch.uint8).to(ratio.device), change.to(ratio.device)


def _check(source: LayerPages, target: LayerPages, source_pages: Tensor, target_pages: Tensor) -> None:
    alike = replace(target.format, encoding=source.format.encoding)
    are_codes = source.format.encoding.is_fp8 and target.format.encoding.is_fp8
    if source.format != alike or not are_codes or source.format.record is not None:
        raise BadTensor(
            f"pages in {source.format} cannot be converted to {target.format}; both must be in eight bits, no records, "
            "and differ only in the encoding"
        )
    if source.k.device != target.k.device:
        raise BadTensor(f"the source is on {source.k.device}, the target on {target.k.device}; copy it there first")
    for name, ids, pages in (("source_pages", source_pages, source), ("target_pages", target_pages, target)):
        if ids.dtype != torch.int64 or ids.dim() != 1 or ids.device != pages.k.device:
            raise BadTensor(f"{name} are {ids.dtype} {list(ids.shape)} on {ids.device}; give int64 [n] on the pages'")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(pages.k):
            raise BadTensor(f"{name} are from {int(ids.min())} to {int(ids.max())}; there are {len(pages.k)} pages")
    if len(source_pages) != len(target_pages):
        raise BadTensor(f"{len(source_pages)} pages cannot be converted to {len(target_pages)}; give as many of both")
    if bool((target_pages == RESERVED_PAGE).any()) or len(set(target_pages.tolist())) != len(target_pages):
        raise BadTensor("target_pages names page 0, which stays zero, or a page twice")
    if source.raw_k.untyped_storage().data_ptr() == target.raw_k.untyped_storage().data_ptr():
        moved = source_pages != target_pages
        clash = target_pages[moved & torch.isin(target_pages, source_pages)]
        if len(clash):
            raise BadTensor(
                f"page {int(clash[0])} is both read and written in one pool; convert to pages that are not read, "
                "or to a pool of their own"
            )
