"""KVPool: the memory of K and V, in pages. Page 0 is reserved and always zero.

HybridKVPool has one pool for each space. Sliding-window layers may have their pages in the SWA space, which needs fewer
of them: pages that have left every window are reused.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rocm_attn.batch.step_batch import INT32_MAX
from rocm_attn.errors import BadProblem, NeverFits
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import PageFormat, PoolKind, Scales
from rocm_attn.kernels.cache.page_rows import empty_vectorised_pages
from rocm_attn.paging.index_spaces import RESERVED_PAGE, Space, space_of_states
from rocm_attn.paging.storage import OfLayers
from rocm_attn.problem import UNLIMITED_WINDOW, VECTOR_BYTES, Problem


def require_slots(num_pages: int, page_size: int) -> None:
    """Raises NeverFits for a pool without a page to give out, or with more slots than an int32 counts."""
    if num_pages < 2:
        raise NeverFits(f"num_pages is {num_pages}; at least 2 are needed, because page 0 is reserved")
    if num_pages * page_size > INT32_MAX:
        raise NeverFits(
            f"{num_pages} pages of {page_size} tokens overflow an int32 slot id; use at most "
            f"{INT32_MAX // page_size} pages, or fewer or shorter sequences"
        )


class KVPool:
    """K and V pages for the layers of one space, in order.

    A page id means the same page in every layer, so a sequence needs one row of one table. Each layer has allocations
    of its own: Triton uses AMD's buffer loads only on storages of up to 2 GiB, which all layers together exceed. A
    layer with an indexer has index pages too, with the same ids.

    states: formats of pages with the state of layers, which may be those of another space
    layers: the pages of every layer, then the index pages of those that have an indexer, then states
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        num_pages: int,
        page_size: int,
        device: torch.device,
        states: Sequence[PageFormat] = (),
    ) -> None:
        self.page_size = page_size
        require_slots(num_pages, page_size)
        self.num_pages = num_pages
        self.device = device
        formats = [problem.page_format for problem in problems]
        formats += [problem.index_format for problem in problems if problem.index_format is not None]
        formats += states
        self.layers = tuple(self._allocate(form) for form in formats)

    @property
    def num_bytes(self) -> int:
        return self.num_pages * sum(layer.format.page_bytes for layer in self.layers)

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copies whole pages in every layer: target[i] gets the content that source[i] had before the call.

        source, target: int64 [n] page ids on the pool's device; targets are distinct and never page 0
        """
        for line in (line for layer in self.layers for line in layer.lines):
            line.index_copy_(0, target, line.index_select(0, source))

    def _allocate(self, form: PageFormat) -> LayerPages:
        # Not torch.zeros, because nothing may depend on the content of a page that no token was stored to.
        pages = self._empty(form)
        for line in pages.lines:
            line[RESERVED_PAGE].zero_()
        return pages

    def _empty(self, form: PageFormat) -> LayerPages:
        dtype = form.encoding.dtype
        if form.kind is PoolKind.LATENT:
            memory = torch.empty(self.num_pages, form.line, dtype=dtype, device=self.device)
            return LayerPages.latent(memory, form, self._scale(form))
        pages, heads = (self.num_pages, form.page_size), form.num_kv_heads
        if form.kind is PoolKind.VECTORIZED:
            dims, vector = (form.head_dim, form.v_head_dim), VECTOR_BYTES // dtype.itemsize
            k, v = empty_vectorised_pages(*pages, heads, dims, vector, dtype=dtype, device=self.device)
        else:
            k, v = (
                torch.empty(*pages, heads, dim, dtype=dtype, device=self.device)
                for dim in (form.head_dim, form.v_head_dim)
            )
        return LayerPages(k, v, form, self._scale(form), self._scale(form))

    def _scale(self, form: PageFormat) -> Tensor | None:
        """Scales of K or of V, 1 if a caller sets them later; the store writes those of tokens."""
        if not form.scale_shape:
            return None
        if form.scales is not Scales.TOKEN:
            return torch.ones(form.scale_shape, dtype=torch.float32, device=self.device)
        return torch.empty(self.num_pages, *form.scale_shape, dtype=torch.float32, device=self.device)


class HybridKVPool:
    """The pools of a model's layers: one in the full space, and one in the SWA space if layers live there.

    problems:  one for each layer
    spaces:    the space of each
    num_pages: space -> pages, the reserved page 0 included
    layer:     layer of the model -> its pages, in the space of its problem
    space_of_states: the space of the layers' states

    Raises BadProblem, NeverFits.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        spaces: Sequence[Space],
        *,
        num_pages: Mapping[Space, int],
        device: torch.device,
    ) -> None:
        if not problems:
            raise BadProblem("there are no layers; give one Problem for each attention layer of the model")
        sizes = sorted({problem.page_size for problem in problems})
        if len(sizes) != 1:
            raise BadProblem(f"layers disagree on the page size ({sizes}); give all layers of a pool the same")
        self.page_size = sizes[0]
        self.device = device
        self._space_of_layer = tuple(spaces)
        folding = [layer for layer, problem in enumerate(problems) if problem.state_format is not None]
        if Space.SWA in num_pages and Space.SWA not in spaces and not folding:
            raise BadProblem("no layer has a window, so the SWA space would be empty; leave swa_pages out")
        self.space_of_states = space_of_states(num_pages)
        states = [form for problem in problems if (form := problem.state_format) is not None]
        self._pools = {
            space: KVPool(
                [problem for problem, its in zip(problems, spaces, strict=True) if its is space],
                num_pages=pages,
                page_size=self.page_size,
                device=device,
                states=states if space is self.space_of_states else (),
            )
            for space, pages in num_pages.items()
        }
        pages = {space: iter(pool.layers) for space, pool in self._pools.items()}
        self._layers = OfLayers(next(pages[space]) for space in spaces)
        # The dict's own method, because each layer of each step calls it.
        self.layer: Callable[[int], LayerPages] = self._layers.__getitem__
        indexed = [layer for layer, problem in enumerate(problems) if problem.index_format is not None]
        self._index = {layer: next(pages[spaces[layer]]) for layer in indexed}
        self._states = {layer: next(pages[self.space_of_states]) for layer in folding}

    def format(self, layer: int) -> PageFormat:
        """The format of the pages of a layer."""
        return self._layers[layer].format

    def take(self, layer: int, pages: LayerPages) -> None:
        """Uses these pages for a layer: its pages with scales in other memory."""
        self._layers[layer] = pages

    def index(self, layer: int) -> LayerPages:
        """The index pages of a layer of the model that has an indexer; v is all of k."""
        return self._index[layer]

    def has_index(self, layer: int) -> bool:
        """True if a layer of the model has index pages."""
        return layer in self._index

    def state(self, layer: int) -> LayerPages:
        """The pages of the state of a layer whose rows stand for several tokens: K holds values, and V gates."""
        return self._states[layer]

    def has_state(self, layer: int) -> bool:
        """True if a layer of the model has a state."""
        return layer in self._states

    def space_of_layer(self, layer: int) -> Space:
        return self._space_of_layer[layer]

    def in_space(self, space: Space) -> KVPool:
        """The pages of the layers of a space."""
        return self._pools[space]

    @property
    def num_pages(self) -> int:
        """Pages of the full space."""
        return self._pools[Space.FULL].num_pages

    @property
    def num_bytes(self) -> int:
        return sum(pool.num_bytes for pool in self._pools.values())


def space_of(problem: Problem, *, has_swa: bool) -> Space:
    """The space of the layers of a problem. has_swa: True if rows have pages in the SWA space"""
    return Space.SWA if has_swa and problem.window_left != UNLIMITED_WINDOW else Space.FULL


def state_bytes(problems: Sequence[Problem]) -> int:
    """Bytes that one page of the states of all layers takes."""
    return sum(form.page_bytes for problem in problems if (form := problem.state_format) is not None)


def page_bytes(problems: Sequence[Problem]) -> int:
    """Bytes that one page takes over all layers, index keys included, states not."""
    formats = (form for problem in problems for form in (problem.page_format, problem.index_format))
    return sum(form.page_bytes for form in formats if form is not None)
