"""AdoptedPages: the pages of every layer, which an engine brings, and what it says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor, NeverFits, WrongState
from rocm_attn.kernels.cache.layer_pages import NEAR, LayerPages
from rocm_attn.kernels.cache.page_format import FormatMismatch, PageFormat
from rocm_attn.kernels.cache.page_rows import key_rows, value_rows
from rocm_attn.paging.adopted import Gate
from rocm_attn.paging.adopted_index import AdoptedIndexPages
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import LARGEST_SCALE, SMALLEST_SCALE, PoolKind, Problem, Scales

_AXES = "kv", "page", "token", "head", "dim"


def layer_pages(kv: Tensor | Sequence[Tensor], axes: str) -> tuple[tuple[Tensor, Tensor], ...]:
    """K and V pages of each layer as views of an engine's KV cache; AdoptedPages.bind_all says what is what."""
    named = axes.split()
    wanted = {*_AXES, "layer"} if isinstance(kv, Tensor) else {*_AXES}
    if len(named) != len(wanted) or set(named) != wanted:
        raise BadTensor(
            f"the axes are {axes!r}; name each of {', '.join(_AXES)} once, and layer too where one tensor has all "
            "layers"
        )
    tensors = [kv] if isinstance(kv, Tensor) else kv
    for tensor in tensors:
        if tensor.dim() != len(named) or tensor.shape[named.index("kv")] != 2:
            raise BadTensor(
                f"a KV cache of shape {list(tensor.shape)} has not the axes {axes!r}: that is {len(named)} dimensions, "
                "and kv has 2 entries"
            )
    if isinstance(kv, Tensor):
        tensors = kv.unbind(named.index("layer"))
        named.remove("layer")
    order = [named.index(axis) for axis in _AXES]
    return tuple((tensor.permute(order)[0], tensor.permute(order)[1]) for tensor in tensors)


@dataclass(frozen=True, slots=True)
class EnginePages:
    """What an engine says of a layer's pages, beside the tensors.

    k_scale, v_scale: float32, on the device: [] or [1] for a layer, [kv_heads] for heads, [pages, kv_heads, page_size]
                      for tokens; they stay the engine's, and are read and, those of tokens, written where they lie.
                      Those of a layer and of heads are positive from bind() on. None where the format has none
    format:           what its pages hold, by whom. Bytes (uint8) do not say it, so of eight bits it must be declared;
                      of others it may be
    """

    k_scale: Tensor | None
    v_scale: Tensor | None
    format: PageFormat


class AdoptedPages:
    """The pages of every layer, which an engine brings: ExternalAttention.pages.

    problems:     one for each layer
    spaces:       the space of each
    num_pages:    the most that a layer may have
    page_strides: whether they may have any strides but the last
    binds_calls:  whether a layer may have other pages at each call, graphs or not: their number is not known when a
                  step is filled
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        spaces: Sequence[Space],
        *,
        num_pages: int,
        page_strides: bool,
        binds_calls: bool,
        device: torch.device,
        gate: Gate,
    ) -> None:
        self.page_size = problems[0].page_size
        self.device = device
        self._problems = tuple(problems)
        self._num_pages = num_pages
        self._page_strides, self._binds_calls = page_strides, binds_calls
        self._spaces = tuple(spaces)
        self._fewest = dict.fromkeys(spaces, num_pages)
        # Graphs read it: pages of a layer may be bound anew, and be fewer.
        self._in_every_layer = {
            space: torch.full((1,), num_pages, dtype=torch.int32, device=device) for space in self._fewest
        }
        self._gate = gate
        self._aligned_sides: dict[int, str] = {}
        self._aligned_rows: dict[int, str] = {}
        self._layers: list[LayerPages | None] = [None] * len(problems)
        self._index_pages = AdoptedIndexPages(
            problems, num_pages=num_pages, device=device, moved=self._refuse_moved, formats=gate.guards.formats
        )

    def read_aligned(self, *, sides: Mapping[int, str], rows: Mapping[int, str]) -> None:
        """Layers whose K and V must begin at multiples of 16 bytes, and those whose pages must have aligned rows, each
        with the name of a kernel that reads no others.
        """
        self._aligned_sides.update(sides)
        self._aligned_rows.update(rows)

    def bind_all(
        self, kv: Tensor | Sequence[Tensor], axes: str, coded: Sequence[EnginePages | None] | None = None
    ) -> None:
        """Use an engine's KV cache for all layers, from now on: bind() of views of it, layer after layer.

        kv:   one tensor for all layers, or one for each, in order
        axes: what the dimensions of a tensor are, in order: kv (K, then V), page, token, head and dim, each once, and
              layer where one tensor has all of them. "kv layer page token head dim" is nano-vllm's, "kv page token head
              dim" and "page kv token head dim" are vLLM's for each layer, "page kv head token dim" is FlashInfer's HND
        coded: for each layer, as bind() takes it; None: no layer is in eight bits, and nothing is said of any
        Raises as bind() does, and BadTensor for other axes, or another number of layers; nothing has changed then,
        unless a layer's pages are refused: those before it are bound.
        """
        layers, count = layer_pages(kv, axes), len(self._problems)
        if len(layers) != count:
            raise BadTensor(f"the KV cache has {len(layers)} layers, the model {count}")
        coded = [None] * count if coded is None else coded
        if len(coded) != count:
            raise BadTensor(f"coded has {len(coded)} entries, the model {count} layers")
        for layer, (k, v) in enumerate(layers):
            self.bind(layer, k, v, coded[layer])

    def bind_index(
        self, layer: int, keys: Tensor, scale: Tensor | None = None, declared: PageFormat | None = None
    ) -> None:
        """Use these index pages for a layer whose problem has an Indexer, from now on.

        keys:     [pages, page_size / key_tokens, head_dim of the indexer], with the page ids of the layer's own pages
        scale:    float32 [1] or [pages, page_size / key_tokens], as the indexer's key_scales says
        declared: what the engine says that they hold: latent rows of one head, as Problem.index_format; of eight bits
                  it must be said, and keys may be bytes (uint8)
        Raises BadTensor, and WrongState where graphs read others, or while another thread has a step.
        """
        self._gate.change("pages.bind_index()")
        require_layer(layer, len(self._problems))
        self._index_pages.bind(layer, keys, scale, declared)
        self._count_pages(self._spaces[layer])

    def in_every_layer(self, space: Space) -> Tensor:
        """int32 [1], on the device: the pages that every layer of a space has, of those that were bound so far."""
        return self._in_every_layer[space]

    def _count_pages(self, space: Space) -> None:
        """A layer of this space has other pages."""
        if self._binds_calls:
            return
        layers = [layer for layer, its in enumerate(self._spaces) if its is space]
        bound = [*(self._layers[layer] for layer in layers), *(self._index_pages.bound(layer) for layer in layers)]
        counts = [side.shape[0] for pages in bound if pages is not None for side in (pages.k, pages.v)]
        fewest = min(self._num_pages, *counts)
        if fewest != self._fewest[space]:
            self._in_every_layer[space].fill_(fewest)
            self._fewest[space] = fewest

    def bind(self, layer: int, k: Tensor, v: Tensor, coded: EnginePages | None = None) -> None:
        """Use these pages for a layer, from now on.

        k, v:  [pages, page_size, kv_heads, head_dim | v_head_dim], views of any kind whose last stride is 1; contiguous
               unless the options say page_strides. Of a latent layer, v is the first part of k. Eight-bit ones in their
               encoding's dtype, or as bytes (uint8). Their rows as the options say
        coded: of eight-bit pages, their factors and what the engine says that they hold; of others it may be said too
        Raises BadTensor, NeverFits, and WrongState where graphs read others, or while another thread has a step.
        """
        self._gate.change("pages.bind()")
        require_layer(layer, len(self._problems))
        k, v = self._declared(layer, k, v, coded)
        self._check(layer, "k", k, key_rows(k).cells, self._problems[layer].head_dim)
        self._check(layer, "v", v, value_rows(v).cells, self._problems[layer].v_head_dim)
        if self._problems[layer].pool is PoolKind.LATENT and (v.data_ptr(), v.stride()) != (k.data_ptr(), k.stride()):
            raise BadTensor(f"layer {layer} is latent: its v is k[..., :{self._problems[layer].v_head_dim}]")
        bound, pages = self._layers[layer], self._pages(layer, k, v, coded)
        self._check_alignment(layer, pages)
        if bound is not None and _place(bound) != _place(pages) and self._refuse_moved(f"the pages of layer {layer}"):
            return
        self._layers[layer] = pages
        self._count_pages(self._spaces[layer])

    def require_bound(self) -> None:
        """Raise WrongState unless every layer has its pages, and its index pages if it has an indexer; where pages
        stay."""
        if not self._binds_calls:
            for layer, problem in enumerate(self._problems):
                self.layer(layer)
                if problem.index_format is not None:
                    self.index(layer)

    def _refuse_moved(self, pages: str) -> bool:
        """Pages have moved; whether others stay bound in their place, which graphs read. Raises WrongState."""
        if not self._gate.is_sealed or self._binds_calls:
            return False
        self._gate.guards.moved(
            f"{pages} have moved, and graphs read the old ones; keep them where they are, or build anew and capture "
            "again"
        )
        return True

    def _check_alignment(self, layer: int, pages: LayerPages) -> None:
        k, v = pages.k, pages.v
        if layer in self._aligned_sides and not pages.has_aligned_sides:
            raise BadTensor(
                f"layer {layer}: k and v begin at addresses {k.data_ptr():#x} and {v.data_ptr():#x}; "
                f"{self._aligned_sides[layer]} reads those that begin at multiples of 16 bytes; lay them so, or build "
                "with unaligned_rows=True"
            )
        if layer in self._aligned_rows and not pages.has_aligned_rows:
            raise BadTensor(
                f"layer {layer}: k and v have strides {k.stride()} and {v.stride()} from addresses {k.data_ptr():#x} "
                f"and {v.data_ptr():#x}; {self._aligned_rows[layer]} reads rows that begin at multiples of 16 "
                f"elements, less than {NEAR} apart in a page; lay them so, or build with unaligned_rows=True"
            )

    def _declared(self, layer: int, k: Tensor, v: Tensor, coded: EnginePages | None) -> tuple[Tensor, Tensor]:
        """Pages in the dtype of what they are declared to hold, which is what the layer's kernels are for."""
        wanted = self._problems[layer].page_format
        if coded is None:
            if wanted.encoding.is_fp8:
                raise BadTensor(
                    f"layer {layer} keeps K and V in {wanted.encoding.value}; say what its pages hold and where their "
                    "factors are, as coded: EnginePages(k_scale, v_scale, format), to bind_all() one for each layer"
                )
            return k, v
        self._gate.guards.formats(f"pages of layer {layer}", coded.format, wanted)
        declared = coded.format.encoding
        for pages in (k, v):
            if pages.dtype != declared.dtype and not (declared.is_fp8 and pages.dtype == torch.uint8):
                raise BadTensor(
                    f"the pages of layer {layer} are {pages.dtype}, and were declared to hold {declared.value}"
                )
        dtype = wanted.encoding.dtype
        return k.view(dtype) if k.dtype == torch.uint8 else k, v.view(dtype) if v.dtype == torch.uint8 else v

    def _pages(self, layer: int, k: Tensor, v: Tensor, coded: EnginePages | None) -> LayerPages:
        form = self._problems[layer].page_format
        scales = () if coded is None else (coded.k_scale, coded.v_scale)
        for scale in scales:
            if scale is not None and scale.device != self.device:
                raise BadTensor(f"a factor of layer {layer} is on {scale.device}, its pages on {self.device}")
        try:
            # A factor without a dimension is an engine's way to keep one for the layer.
            pages = LayerPages(
                k, v, form, *(scale.view(1) if scale is not None and not scale.dim() else scale for scale in scales)
            )
        except FormatMismatch as error:
            raise BadTensor(f"layer {layer}: {error}") from error
        if form.scales in (Scales.LAYER, Scales.HEAD) and not self._binds_calls:
            self._check_factors(layer, pages)
        return pages

    def _check_factors(self, layer: int, pages: LayerPages) -> None:
        """Raise BadTensor for factors that no store can divide by, and for two of latent rows. Waits for the device."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        assert pages.k_scale is not None
        assert pages.v_scale is not None
        for name, factors in (("k", pages.k_scale), ("v", pages.v_scale)):
            if not bool(((factors >= SMALLEST_SCALE) & (factors <= LARGEST_SCALE)).all()):
                raise BadTensor(
                    f"the factors of {name} of layer {layer} are {factors.tolist()}; each must be a positive number "
                    "from 2**-100 to 2**100"
                )
        if pages.format.kind is PoolKind.LATENT and not torch.equal(pages.k_scale, pages.v_scale):
            raise BadTensor(
                f"layer {layer} is latent, and its factors are {pages.k_scale.tolist()} for k and "
                f"{pages.v_scale.tolist()} for v: its V is a part of its K, so give both the same"
            )

    def layer(self, layer: int) -> LayerPages:
        """The pages of one layer. Raises WrongState while it has none."""
        pages = self._layers[layer]
        if pages is None:
            raise WrongState(f"layer {layer} has no pages yet; call pages.bind() before its first step")
        return pages

    def format(self, layer: int) -> PageFormat:
        """What the pages of a layer must hold to be bound."""
        return self._problems[layer].page_format

    def index(self, layer: int) -> LayerPages:
        """The index pages of a layer that has an indexer. Raises WrongState while it has none."""
        return self._index_pages.layer(layer)

    def _check(self, layer: int, name: str, pages: Tensor, cells: Tensor, dim: int) -> None:
        problem = self._problems[layer]
        page_size, heads = cells.shape[1] * cells.shape[5], cells.shape[2]
        found, wanted = (
            (page_size, heads, cells.shape[3] * cells.shape[4]),
            (problem.page_size, problem.num_kv_heads, dim),
        )
        if found != wanted:
            raise BadTensor(
                f"{name} of layer {layer} has pages of {found[0]} tokens, {found[1]} heads and {found[2]} elements; "
                f"the layer needs {wanted[0]}, {wanted[1]} and {wanted[2]}"
            )
        held = problem.page_format.encoding.dtype
        if pages.dtype != held or pages.device != self.device:
            raise BadTensor(
                f"{name} of layer {layer} is {pages.dtype} on {pages.device}; the layer keeps {held} on {self.device}"
            )
        if pages.shape[0] > self._num_pages:
            raise NeverFits(
                f"{name} of layer {layer} has {pages.shape[0]} pages, kernels were chosen for {self._num_pages}; "
                "raise num_pages"
            )
        if pages.stride(-1) != 1:
            raise BadTensor(f"{name} of layer {layer} has stride {pages.stride(-1)} within a row; it must be 1")
        is_part = problem.pool is PoolKind.LATENT and name == "v"
        if not self._page_strides and not is_part and not pages.is_contiguous():
            raise BadTensor(
                f"{name} of layer {layer} has strides {pages.stride()}, and kernels were chosen that may take pages "
                "for contiguous; build with page_strides=True"
            )


def require_layer(layer: int, count: int) -> None:
    """Raise BadTensor for a layer that does not exist, of so many."""
    if not 0 <= layer < count:
        raise BadTensor(f"layer {layer} does not exist; there are layers 0 to {count - 1}")


def _place(pages: LayerPages) -> list[tuple[int, tuple[int, ...]]]:
    """What a graph has frozen of a layer's pages."""
    return [(tensor.data_ptr(), tensor.stride()) for tensor in pages.tensors().values()]
