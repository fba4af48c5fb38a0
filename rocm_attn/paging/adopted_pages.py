"""AdoptedPages: the KV cache tensors that an engine owns, bound to the layers, as the engine describes them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.batch.step_batch import INT32_MAX
from rocm_attn.errors import BadProblem, BadTensor, NeverFits, WrongState, no_such_layer
from rocm_attn.kernels.cache.layer_pages import NEAR, LayerPages
from rocm_attn.kernels.cache.page_format import FormatMismatch, PageFormat
from rocm_attn.machine.devices import require_tensor
from rocm_attn.machine.settings import require_kind
from rocm_attn.paging.adopted import ChangeGate
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.storage import OfLayers
from rocm_attn.problem import LARGEST_SCALE, SMALLEST_SCALE, PoolKind, Problem, Scales

_AXES = "kv", "page", "token", "head", "dim"


def check_scales(of: str, pool: PoolKind, k: Tensor, v: Tensor) -> None:
    """Raises BadTensor for scales that no store can divide by, and for two of latent rows. Waits for the device.

    of: the layer, or its index keys, for messages
    """
    for name, scales in (("k", k), ("v", v)):
        if not bool(((scales >= SMALLEST_SCALE) & (scales <= LARGEST_SCALE)).all()):
            raise BadTensor(
                f"the scales of {name} of {of} are {scales.tolist()}; each must be a positive number from "
                "2**-100 to 2**100"
            )
    if pool is PoolKind.LATENT and not torch.equal(k, v):
        raise BadTensor(
            f"{of} is latent, and its scales are {k.tolist()} for k and {v.tolist()} for v: its V is a part "
            "of its K, so give the same for both"
        )


def layer_pages(kv: Tensor | Sequence[Tensor], axes: str) -> tuple[tuple[Tensor, Tensor], ...]:
    """K and V pages of each layer as views of an engine's KV cache; see AdoptedPages.bind_all for the axes."""
    require_kind("axes", axes, str, BadTensor)
    named = axes.split()
    wanted = {*_AXES, "layer"} if isinstance(kv, Tensor) else {*_AXES}
    if len(named) != len(wanted) or set(named) != wanted:
        raise BadTensor(
            f"the axes are {axes!r}; name each of {', '.join(_AXES)} once, and layer too if one tensor holds all layers"
        )
    if not isinstance(kv, Tensor):
        require_kind("kv", kv, Sequence, BadTensor)
    tensors = [kv] if isinstance(kv, Tensor) else kv
    for tensor in tensors:
        require_tensor("the KV cache of a layer", tensor)
        if tensor.dim() != len(named) or tensor.shape[named.index("kv")] != 2:
            raise BadTensor(
                f"a KV cache of shape {list(tensor.shape)} does not have the axes {axes!r}: they name {len(named)} "
                "dimensions, and kv must have 2 entries"
            )
    if isinstance(kv, Tensor):
        tensors = kv.unbind(named.index("layer"))
        named.remove("layer")
    order = [named.index(axis) for axis in _AXES]
    return tuple((tensor.permute(order)[0], tensor.permute(order)[1]) for tensor in tensors)


@dataclass(frozen=True, slots=True)
class EnginePages:
    """An engine's description of a layer's pages, in addition to the tensors: scales and format.

    k_scale, v_scale: float32, on the device: [] or [1] with scales LAYER, [kv_heads] with HEAD, [pages, kv_heads,
                      page_size] with TOKEN; read in place, and with TOKEN also written in place. With LAYER and HEAD
                      they must be positive from bind() on. None if the format has no scales, or has them in its rows
    format:           the format of the pages; required for eight-bit pages, optional for others
    """

    k_scale: Tensor | None
    v_scale: Tensor | None
    format: PageFormat


class AdoptedPages:
    """An engine's KV cache, bound layer by layer: ExternalAttention.pages.

    problems, spaces: one for each layer
    num_pages:        most pages of a layer
    page_strides:     True if pages may be strided; the last stride is 1
    even_slots:       True if all slots of such pages lie at equal distances
    binds_calls:      True if a layer's pages may change at each call; fill() then does not know their number
    in_every_layer:   space -> int32 [1], on the device, which graphs read: the fewest pages of a bound layer
    aligned_sides, aligned_rows: layers whose K and V must begin at multiples of 16 bytes, and layers whose pages must
                                 have aligned rows, each with the name of the kernel that needs it
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        spaces: Sequence[Space],
        *,
        num_pages: int,
        page_strides: bool,
        even_slots: bool,
        binds_calls: bool,
        device: torch.device,
        gate: ChangeGate,
    ) -> None:
        self.page_size, self.device = problems[0].page_size, device
        self._problems, self._spaces = tuple(problems), tuple(spaces)
        self._num_pages, self._page_strides, self._even_slots = num_pages, page_strides, even_slots
        self._binds_calls = binds_calls
        self._gate = gate
        self.in_every_layer = {
            space: torch.full((1,), num_pages, dtype=torch.int32, device=device) for space in dict.fromkeys(spaces)
        }
        self._fewest = dict.fromkeys(spaces, num_pages)
        self.aligned_sides: dict[int, str] = {}
        self.aligned_rows: dict[int, str] = {}
        # A layer has None before its first pages, and after a call whose pages were let go.
        self.bound = OfLayers[LayerPages | None](None for _ in problems)
        self._index = OfLayers[LayerPages | None](None for _ in problems)

    def bind_all(
        self, kv: Tensor | Sequence[Tensor], axes: str, coded: Sequence[EnginePages | None] | None = None
    ) -> None:
        """Binds an engine's KV cache to all layers, by bind() of its views.

        kv:    one tensor for all layers, or one for each, in order
        axes:  the names of a tensor's dimensions, in order: kv (K, then V), page, token, head and dim, each once, and
               layer if one tensor has all layers, as in nano-vllm's "kv layer page token head dim"
        coded: the argument of bind() for each layer; None: no layer has eight bits, and no format is declared
        Raises what bind() raises, and then the layers before the refused one are bound; and BadTensor for other axes,
        or another number of layers, and then nothing has changed.
        """
        layers, count = layer_pages(kv, axes), len(self._problems)
        if len(layers) != count:
            raise BadTensor(f"the KV cache has {len(layers)} layers and the model {count}; give one per layer")
        coded = [None] * count if coded is None else coded
        if len(coded) != count:
            raise BadTensor(f"coded has {len(coded)} entries and the model {count} layers; give one per layer")
        for layer, (k, v) in enumerate(layers):
            self.bind(layer, k, v, coded[layer])

    def bind(self, layer: int, k: Tensor, v: Tensor, coded: EnginePages | None = None) -> None:
        """Binds these pages to a layer, from now on.

        k, v:  [pages, page_size, kv_heads, head_dim | v_head_dim], last stride 1; contiguous unless the options have
               page_strides. In a latent layer, v is the first part of k. Eight-bit pages have their encoding's dtype,
               or uint8; a packed record is a row of k in bytes. ExternalOptions restrict strides and alignment
        coded: scales and format; required for eight-bit pages, optional for others
        Raises BadTensor, NeverFits, and WrongState if graphs read other pages, or while another thread has a step.
        """
        self._gate.change("pages.bind()")
        problem = self._problem(layer)
        if coded is not None:
            require_kind("coded", coded, EnginePages, BadTensor)
        k_scale, v_scale, declared = (
            (None, None, None) if coded is None else (coded.k_scale, coded.v_scale, coded.format)
        )
        # Engines may keep the scale of a layer as a tensor without dimensions.
        scales = [scale.view(1) if scale is not None and not scale.dim() else scale for scale in (k_scale, v_scale)]
        pages = self._pages(f"pages of layer {layer}", k, v, scales, declared, problem.page_format)
        self._check_rows(layer, pages)
        self._check_scales(f"layer {layer}", pages)
        self._adopt(self.bound, layer, "pages", pages)

    def bind_index(
        self, layer: int, keys: Tensor, scale: Tensor | None = None, declared: PageFormat | None = None
    ) -> None:
        """Binds these index pages to a layer with an Indexer, from now on.

        keys:     [pages, page_size / key_tokens, head_dim of the indexer], with the same page ids as the layer's pages
        scale:    float32 [1], positive, or [pages, page_size / key_tokens], depending on the indexer's key_scales
        declared: the format, as Problem.index_format: latent rows of one head. It is required for eight bits, and then
                  keys may be uint8
        Raises BadTensor, and WrongState if graphs read other pages, or while another thread has a step.
        """
        self._gate.change("pages.bind_index()")
        form = self._problem(layer).index_format
        if form is None:
            raise BadTensor(f"layer {layer} has no indexer, so it has no index pages; leave them out")
        require_tensor(f"the index pages of layer {layer}", keys)
        if keys.dim() != 3:
            raise BadTensor(f"the index pages of layer {layer} are {list(keys.shape)}; give [pages, keys, elements]")
        if scale is not None:
            require_tensor(f"the scale of the index keys of layer {layer}", scale)
        rows = keys.unsqueeze(2)
        scale = scale.unsqueeze(1) if scale is not None and scale.dim() == 2 else scale
        pages = self._pages(f"index pages of layer {layer}", rows, rows, [scale, scale], declared, form)
        self._check_scales(f"the index keys of layer {layer}", pages)
        self._adopt(self._index, layer, "index pages", pages)

    def require_bound(self) -> None:
        """Raises WrongState unless every layer has pages bound, and index pages if it has an indexer."""
        for layer, problem in enumerate(self._problems):
            self.layer(layer)
            if problem.index_format is not None:
                self.index(layer)

    def layer(self, layer: int) -> LayerPages:
        """The bound pages of one layer. Raises WrongState while it has none, BadTensor if there is no such layer."""
        pages = self.bound[layer]
        if pages is None:
            raise WrongState(f"layer {layer} has no pages yet; call pages.bind() before its first step")
        return pages

    def state(self, layer: int) -> LayerPages:
        """Raises BadProblem: an engine's layers have rows of one token, and no state."""
        raise BadProblem(f"layer {layer} of an engine has no state")

    def index(self, layer: int) -> LayerPages:
        """The index pages of a layer that has an indexer. Raises as layer() does."""
        pages = self._index[layer]
        if pages is None:
            raise WrongState(f"layer {layer} has no index pages yet; call pages.bind_index() before its first step")
        return pages

    def format(self, layer: int) -> PageFormat:
        """The format that pages of a layer must have to be bound. Raises BadTensor for a layer that does not exist."""
        return self._problem(layer).page_format

    def _problem(self, layer: int) -> Problem:
        if layer not in range(len(self._problems)):
            raise no_such_layer(layer, len(self._problems))
        return self._problems[layer]

    def _adopt(self, of_layers: OfLayers[LayerPages | None], layer: int, name: str, pages: LayerPages) -> None:
        """Uses these pages for a layer from now on, unless graphs read others of it."""
        bound, are_fixed = of_layers[layer], self._gate.is_sealed and not self._binds_calls
        if bound is not None and are_fixed and _place(bound) != _place(pages):
            self._gate.guards.moved(
                f"the {name} of layer {layer} have moved, and graphs read the old ones; keep them in place, or "
                "build anew and capture again"
            )
            return
        of_layers[layer] = pages
        if not self._binds_calls:
            self._count_pages(self._spaces[layer])

    def _count_pages(self, space: Space) -> None:
        """Counts the pages of a space again after a layer has got other pages."""
        bound = [pages for of_layers in (self.bound, self._index) for pages in of_layers.values()]
        of_space = [pages for pages, its in zip(bound, self._spaces * 2, strict=True) if its is space and pages]
        fewest = min(self._num_pages, *(side.shape[0] for pages in of_space for side in (pages.k, pages.v)))
        if fewest != self._fewest[space]:
            self.in_every_layer[space].fill_(fewest)
            self._fewest[space] = fewest

    def _pages(
        self,
        name: str,
        k: Tensor,
        v: Tensor,
        scales: Sequence[Tensor | None],
        declared: PageFormat | None,
        wanted: PageFormat,
    ) -> LayerPages:
        """A layer's pages, if they have the format of its kernels. name: of the pages, for messages"""
        encoding = wanted.encoding
        for side in (k, v):
            require_tensor(f"a side of the {name}", side)
            if side.dim() < 4:  # a vectorised side has five
                raise BadTensor(f"a side of the {name} is {list(side.shape)}; give [pages, page_size, heads, elements]")
        if declared is not None:
            self._gate.guards.formats(name, declared, wanted)
            if encoding.is_fp8 and k.dtype == v.dtype == torch.uint8:
                k, v = k.view(encoding.dtype), v.view(encoding.dtype)
        elif encoding.is_fp8:
            raise BadTensor(
                f"the {name} are in {encoding.value}; give their format and scales: bind() and bind_all() take "
                "coded, EnginePages(k_scale, v_scale, format), and bind_index() takes scale and format"
            )
        for tensor in (k, v, *scales):
            if tensor is not None and tensor.device != self.device:
                raise BadTensor(f"the {name} or their scales are on {tensor.device}, not on {self.device}")
        for side in (k, v):
            if len(side) > self._num_pages:
                raise NeverFits(
                    f"the {name} are {len(side)}, and kernels were chosen for {self._num_pages}; raise num_pages"
                )
            if len(side) * wanted.page_size > INT32_MAX:
                raise NeverFits(
                    f"the {name} are {len(side)} of {wanted.page_size} tokens each, which overflow an int32 slot id; "
                    f"give at most {INT32_MAX // wanted.page_size}"
                )
            if side.stride(-1) != 1:
                raise BadTensor(f"the {name} have stride {side.stride(-1)} within a row; it must be 1")
        try:
            return LayerPages(k, v, wanted, *scales)
        except FormatMismatch as error:
            raise BadTensor(f"the {name}: {error}") from error

    def _check_scales(self, of: str, pages: LayerPages) -> None:
        """Refuses scales that are there already, and that no store can divide by."""
        is_capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if pages.format.scales in (Scales.LAYER, Scales.HEAD) and not self._binds_calls and not is_capturing:
            assert pages.k_scale is not None
            assert pages.v_scale is not None
            check_scales(of, pages.format.kind, pages.k_scale, pages.v_scale)

    def _check_rows(self, layer: int, pages: LayerPages) -> None:
        """Refuses K and V at addresses that the layer's kernels do not read."""
        k, v, problem = pages.k, pages.v, self._problems[layer]
        is_latent = problem.pool is PoolKind.LATENT
        if is_latent and (v.data_ptr(), v.stride()) != (k.data_ptr(), k.stride()):
            raise BadTensor(f"layer {layer} is latent: its v must be k[..., :{problem.v_head_dim}]")
        # FlashInfer's callers may attend to one tensor as K and V, because they store nothing.
        if not is_latent and not self._binds_calls and k.data_ptr() == v.data_ptr() != 0:
            raise BadTensor(f"k and v of layer {layer} are the same memory; bind the pages of K, then those of V")
        for side in (k,) if is_latent else (k, v):
            if not self._page_strides and not side.is_contiguous():
                raise BadTensor(
                    f"the pages of layer {layer} have strides {side.stride()}, and kernels were chosen for "
                    "contiguous pages; build with page_strides=True"
                )
        if self._even_slots and not pages.page_slots:
            raise BadTensor(
                f"layer {layer}: k and v have strides {k.stride()} and {v.stride()}, and kernels were chosen for slots "
                "at equal distances that begin at multiples of 16 bytes; build with even_slots=False"
            )
        if layer in self.aligned_sides and not pages.has_aligned_sides:
            reads = f"{self.aligned_sides[layer]} reads sides that begin at multiples of 16 bytes"
        elif layer in self.aligned_rows and not pages.has_aligned_rows:
            rows = f"rows that begin at multiples of 16 elements, less than {NEAR} apart in a page"
            reads = f"{self.aligned_rows[layer]} reads {rows}"
        else:
            return
        raise BadTensor(
            f"layer {layer}: k and v have strides {k.stride()} and {v.stride()} from addresses {k.data_ptr():#x} "
            f"and {v.data_ptr():#x}; {reads}; align them, or build with unaligned_rows=True"
        )


def _place(pages: LayerPages) -> list[tuple[int, tuple[int, ...]]]:
    """The properties of a layer's pages that a graph has frozen."""
    return [(tensor.data_ptr(), tensor.stride()) for tensor in pages.tensors().values()]
