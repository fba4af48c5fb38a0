"""AdoptedIndexPages: the index pages of layers that have an indexer, which an engine brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor, WrongState
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import PageFormat, Scales
from rocm_attn.problem import Problem


class AdoptedIndexPages:
    """problems: one for each layer; num_pages: the most that a layer may have; formats: of AdoptedGuards

    moved: says whether pages that have moved stay in their place, for graphs that read them; may raise
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        num_pages: int,
        device: torch.device,
        moved: Callable[[str], bool],
        formats: Callable[[str, PageFormat, PageFormat], None],
    ) -> None:
        self._problems = tuple(problems)
        self._num_pages = num_pages
        self._device = device
        self._moved, self._formats = moved, formats
        self._layers: dict[int, LayerPages] = {}

    def bind(self, layer: int, keys: Tensor, scale: Tensor | None, declared: PageFormat | None) -> None:
        """Use these index pages for a layer that has an indexer. declared: what they hold; needed of eight bits

        Raises BadTensor, and WrongState where graphs read others.
        """
        form = self._problems[layer].index_format
        if form is None:
            raise BadTensor(f"layer {layer} has no indexer, and so no index pages; leave them out")
        keys = self._declared(layer, keys, declared, form)
        self._check(layer, keys, scale, form)
        rows = keys.unsqueeze(2)
        factors = scale.unsqueeze(1) if scale is not None and form.scales is Scales.TOKEN else scale
        bound, pages = self._layers.get(layer), LayerPages(rows, rows, form, factors, factors)
        if bound is not None and _place(bound) != _place(pages) and self._moved(f"the index pages of layer {layer}"):
            return
        self._layers[layer] = pages

    def bound(self, layer: int) -> LayerPages | None:
        """The index pages of one layer; None while it has none."""
        return self._layers.get(layer)

    def layer(self, layer: int) -> LayerPages:
        """The index pages of one layer. Raises WrongState while it has none."""
        pages = self.bound(layer)
        if pages is None:
            raise WrongState(f"layer {layer} has no index pages yet; call pages.bind_index() before its first step")
        return pages

    def _declared(self, layer: int, keys: Tensor, declared: PageFormat | None, form: PageFormat) -> Tensor:
        """Keys in the dtype of what they are declared to hold, which is what the layer's kernels are for."""
        if declared is None:
            if form.encoding.is_fp8:
                raise BadTensor(
                    f"layer {layer} keeps index keys in {form.encoding.value}; say what its index pages hold: "
                    "bind_index(layer, keys, scale, format)"
                )
            return keys
        self._formats(f"index pages of layer {layer}", declared, form)
        return keys.view(form.encoding.dtype) if form.encoding.is_fp8 and keys.dtype == torch.uint8 else keys

    def _check(self, layer: int, keys: Tensor, scale: Tensor | None, form: PageFormat) -> None:
        wanted = form.page_size, form.head_dim
        if keys.dim() != 3 or tuple(keys.shape[1:]) != wanted or keys.shape[0] > self._num_pages:
            raise BadTensor(
                f"index pages of layer {layer} are {list(keys.shape)}; the layer needs at most "
                f"{self._num_pages} pages of {wanted[0]} keys with {wanted[1]} elements, [pages, keys, elements]"
            )
        if keys.dtype != form.encoding.dtype or keys.device != self._device or keys.stride(-1) != 1:
            raise BadTensor(
                f"index pages of layer {layer} are {keys.dtype} on {keys.device} with strides {keys.stride()}; they "
                f"must be {form.encoding.dtype} on {self._device}, with stride 1 within a key"
            )
        shapes = {Scales.NONE: None, Scales.LAYER: (1,), Scales.TOKEN: tuple(keys.shape[:2])}
        found = None if scale is None else tuple(scale.shape)
        if found != shapes[form.scales] or (scale is not None and scale.dtype != torch.float32):
            raise BadTensor(
                f"the index keys of layer {layer} have {form.scales.value}, so their factors are float32 "
                f"{shapes[form.scales]}; these are {found} {'' if scale is None else scale.dtype}"
            )


def _place(pages: LayerPages) -> tuple[int, tuple[int, ...], int | None]:
    """What a graph has frozen of index pages."""
    return pages.k.data_ptr(), pages.k.stride(), None if pages.k_scale is None else pages.k_scale.data_ptr()
