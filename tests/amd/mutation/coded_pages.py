"""Eight-bit pages of the checks, and launches that write them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import Encoding, PageFormat, PoolKind, Scales

PAGE_SIZE = 3


def coded_pages(num_pages: int, scales: Scales) -> list[Tensor]:
    """Bytes of three heads of odd dims, with gaps, and the scales of K and V."""
    pages = [torch.zeros(num_pages, 3, PAGE_SIZE, dim + 8, dtype=torch.uint8)[..., :dim] for dim in (24, 40)]
    factors = torch.full((3,), 0.02) if scales is Scales.HEAD else torch.zeros(num_pages, PAGE_SIZE, 3)
    return [*(side.transpose(1, 2) for side in pages), factors, factors.clone()]


def of_coded_pages(launch: Callable[..., None], scales: Scales) -> Callable[..., None]:
    """Adapts to launch(*inputs, K pages, V pages and their scales)."""
    form = PageFormat(Encoding.E4M3FN, PoolKind.SPLIT, PAGE_SIZE, 3, 24, 40, scales)

    def of_tensors(*tensors: Tensor) -> None:
        k, v, k_scale, v_scale = tensors[-4:]
        dtype = form.encoding.dtype
        launch(*tensors[:-4], LayerPages(k.view(dtype), v.view(dtype), form, k_scale, v_scale))

    return of_tensors
