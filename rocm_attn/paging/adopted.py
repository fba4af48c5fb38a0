"""Pages and tables that an engine owns: where they lie, and what a step needs of them.

A table of pages that kernels can read is read where it lies. Any other, of slots of larger pages, of another space, of
another dtype, or lists of pages, is gathered for each step into a table of the space's own, where sequence seq has row
seq + 1 and row 0 stays 0. Where one space is gathered all are, because a sequence has one row in all of them.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import INT32_MAX
from rocm_attn.errors import BadTensor, NeverFits, WrongState
from rocm_attn.kernels.cache.layer_pages import NEAR, LayerPages
from rocm_attn.kernels.cache.page_format import FormatMismatch, PageFormat
from rocm_attn.kernels.cache.page_rows import key_rows, value_rows
from rocm_attn.kernels.metadata.engine_tensors import EngineRows, GatherSource
from rocm_attn.kernels.metadata.step_tensors import TableTerms
from rocm_attn.paging.adopted_index import AdoptedIndexPages
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import PoolKind, Problem

_INTEGERS = (torch.int32, torch.int64)


class TableUnit(enum.Enum):
    """What an entry of an engine's table names."""

    PAGE = "page"
    SLOT = "slot"


@dataclass(frozen=True, slots=True)
class TableSource:
    """An engine's table: rows of pages, or of slots, one for each token.

    entries:   int32 or int64 [rows, width], any strides. Entry j of a row is that of the sequence's page j, or of its
               token j; those of its KV name pages that exist, or 0 where a page was given back. Slots of one page are
               consecutive, from a multiple of the page size on
    unit:      what they name
    slot_map:  int32 or int64 [slots], slot that the table names -> slot of this space, 0 for one that was given back;
               None: the table names this space's own
    null_page: whether page 0 belongs to no one, so that a token there has no page; if not, it is a page like others
    """

    entries: Tensor
    unit: TableUnit = TableUnit.PAGE
    slot_map: Tensor | None = None
    null_page: bool = True

    def __post_init__(self) -> None:
        _check_integers("entries", self.entries, 2)
        if self.slot_map is not None:
            _check_integers("slot_map", self.slot_map, 1)

    @property
    def num_rows(self) -> int:
        return self.entries.shape[0]

    @property
    def gather(self) -> GatherSource:
        """As the kernel that gathers takes it."""
        return GatherSource(self.entries, self.unit is TableUnit.SLOT, None, self.slot_map)

    def lies_right(self, page_size: int) -> bool:
        """Whether kernels can read it where it lies."""
        are_pages = self.unit is TableUnit.PAGE or page_size == 1
        in_order = self.entries.dtype == torch.int32 and self.entries.stride(1) == 1
        return are_pages and in_order and self.slot_map is None

    def row_tokens(self, page_size: int) -> int:
        """Tokens that a row has room for."""
        return self.entries.shape[1] * (page_size if self.unit is TableUnit.PAGE else 1)


@dataclass(frozen=True, slots=True)
class CsrSource:
    """An engine's lists of pages, row after row, as FlashInfer's.

    indptr:    int32 or int64 [rows + 1], any stride; row -> first entry of its pages
    indices:   int32 or int64 [n], any stride; pages
    null_page: as in TableSource
    """

    indptr: Tensor
    indices: Tensor
    null_page: bool = False

    def __post_init__(self) -> None:
        _check_integers("indptr", self.indptr, 1)
        _check_integers("indices", self.indices, 1)
        if self.indptr.shape[0] < 2:
            raise BadTensor(f"indptr has {self.indptr.shape[0]} elements; it needs one more than rows, so at least 2")

    @property
    def num_rows(self) -> int:
        return self.indptr.shape[0] - 1

    @property
    def entries(self) -> Tensor:
        return self.indices

    @property
    def slot_map(self) -> None:
        """Pages are the space's own."""
        return None

    @property
    def gather(self) -> GatherSource:
        """As the kernel that gathers takes it."""
        return GatherSource(self.indices, csr_indptr=self.indptr)

    def lies_right(self, page_size: int) -> bool:
        """Kernels read rows."""
        return False

    def row_tokens(self, page_size: int) -> int:
        """No row ends before its sequence does: each has a length of its own."""
        return INT32_MAX


Source = TableSource | CsrSource


def _check_integers(name: str, tensor: Tensor, dims: int) -> None:
    if tensor.dim() != dims or tensor.dtype not in _INTEGERS or 0 in tensor.shape:
        raise BadTensor(
            f"{name} is {tensor.dtype} {list(tensor.shape)}; "
            f"it must be int32 or int64 with {dims} dimensions, and not empty"
        )


def refuse_moved_table(reason: str) -> None:
    """Graphs would go on reading the old one. Raises WrongState."""
    raise WrongState(reason)


def refuse_other_formats(pages: str, declared: PageFormat, wanted: PageFormat) -> None:
    """Kernels would read finite, wrong numbers. Raises BadTensor."""
    if declared != wanted:
        raise BadTensor(
            f"the {pages} hold {declared}; its kernels read and write {wanted}. Build the layer with a Problem of the "
            "engine's format, or convert the pages (convert_pages)"
        )


def as_the_owner_says(terms: TableTerms) -> TableTerms:
    """Page 0 belongs to no one, or is a page like others."""
    return terms


@dataclass(frozen=True, slots=True)
class AdoptedGuards:
    """The safeguards of tables and pages that an engine owns.

    moved: called with a sentence when a table or pages that graphs read are replaced
    terms: of a space's table
    formats: called with a layer's pages in words, the format that an engine declares for them, and the one that
             kernels are for
    """

    moved: Callable[[str], None] = refuse_moved_table
    terms: Callable[[TableTerms], TableTerms] = as_the_owner_says
    formats: Callable[[str, PageFormat, PageFormat], None] = refuse_other_formats


@dataclass(slots=True)
class AdoptedSpace:
    """The table of one space, as kernels read it.

    source:  the engine's
    entries: int32 [rows, width]: the engine's own, or what a step's pages are gathered into
    gather:  source, as the kernel that gathers takes it
    """

    space: Space
    window_left: int
    terms: TableTerms
    source: Source
    entries: Tensor
    gather: GatherSource


class AdoptedTables:
    """The tables of an engine, in every space that layers live in.

    sources:    space -> table; the spaces' order is that of this mapping
    windows:    space -> previous keys that the furthest-looking of its layers sees
    max_kv_len: tokens of the longest sequence
    num_seqs:   padded sequences of the largest step
    short_kv:   whether sequences may have fewer tokens in their KV than new ones
    Raises BadTensor for a table on another device.

    `rows` are those that sequences may have: that every table has now.
    """

    def __init__(
        self,
        sources: Mapping[Space, Source],
        windows: Mapping[Space, int],
        *,
        page_size: int,
        max_kv_len: int,
        num_seqs: int,
        short_kv: bool,
        device: torch.device,
        guards: AdoptedGuards,
    ) -> None:
        self.page_size = page_size
        self.device = device
        self.gathered = not all(source.lies_right(page_size) for source in sources.values())
        self.max_kv_len = min(max_kv_len, *(source.row_tokens(page_size) for source in sources.values()))
        self.width = -(-self.max_kv_len // page_size)
        self._moved = guards.moved
        self._sealed = False
        self.spaces = tuple(
            AdoptedSpace(
                space,
                windows[space],
                guards.terms(TableTerms(source.null_page, short_kv)),
                source,
                torch.zeros((num_seqs + 1, self.width), dtype=torch.int32, device=device)
                if self.gathered
                else source.entries,
                source.gather,
            )
            for space, source in sources.items()
        )
        for space in self.spaces:
            self._check_device(space.space, space.source)
        self.rows = EngineRows(0, torch.empty(0, dtype=torch.int32, device=device))
        self._count_rows()

    def _count_rows(self) -> None:
        """Sequences may have the rows that every table has."""
        self.rows.num = min(space.source.num_rows for space in self.spaces)
        if self.rows.num > len(self.rows.named):
            # No step has a negative number.
            self.rows.named = torch.full((self.rows.num,), -1, dtype=torch.int32, device=self.device)

    @property
    def csr_indptr(self) -> Tensor | None:
        """Where rows begin in lists of pages; None for tables of rows."""
        return next((space.source.indptr for space in self.spaces if isinstance(space.source, CsrSource)), None)

    def write(self, space: Space, pages: Sequence[Sequence[int]]) -> None:
        """Write pages[i] to the beginning of row i of the engine's table. Raises BadTensor."""
        source = self._of(space).source
        if not isinstance(source, TableSource) or source.unit is not TableUnit.PAGE:
            raise BadTensor(f"the table of the {space.name} space has no rows of pages; write into it yourself")
        lens = np.array([len(row) for row in pages], np.int64)
        width = int(lens.max(initial=0))
        if len(pages) > source.num_rows or width > source.entries.shape[1]:
            raise BadTensor(
                f"{len(pages)} rows of up to {width} pages do not fit the table of the {space.name} space, "
                f"{list(source.entries.shape)}; give it more rows or columns"
            )
        if width:
            cells = torch.zeros((len(pages), width), dtype=source.entries.dtype, pin_memory=self.device.type == "cuda")
            cells.numpy()[np.arange(width) < lens[:, None]] = np.fromiter(
                itertools.chain.from_iterable(pages), np.int64
            )
            source.entries[: len(pages), :width].copy_(cells, non_blocking=True)

    def use(self, space: Space, source: Source | Tensor) -> bool:
        """Read another table in a space from now on; whether memory that kernels read has moved.

        A longer or shorter one at the same address is the same table with other rows. A tensor is a table with these
        entries, and otherwise as before.
        Raises BadTensor for one of another kind, WrongState where graphs read the old one.
        """
        table = self._of(space)
        if isinstance(source, Tensor):
            if isinstance(table.source, CsrSource):
                raise BadTensor(f"the table of the {space.name} space is lists of pages; give a CsrSource")
            source = replace(table.source, entries=source)
        self._check_device(space, source)
        if type(source) is not type(table.source) or source.null_page != table.source.null_page:
            raise BadTensor(f"the table of the {space.name} space is another kind of table than before; build anew")
        if not self.gathered and not source.lies_right(self.page_size):
            raise BadTensor(
                f"the table of the {space.name} space was read where it lies, which takes int32 pages in rows without "
                f"gaps; this one is {source.entries.dtype} with strides {source.entries.stride()}"
            )
        if source.row_tokens(self.page_size) < self.max_kv_len:
            raise NeverFits(
                f"a row of the table of the {space.name} space has room for {source.row_tokens(self.page_size)} "
                f"tokens; sequences may have {self.max_kv_len}"
            )
        has_moved = _places(source) != _places(table.source)
        if has_moved and self._sealed:
            self._moved(
                f"the table of the {space.name} space has moved, and graphs read the old one; write into the table "
                "that there was, or build anew and capture again"
            )
        table.source, table.gather = source, source.gather
        self._count_rows()
        if not self.gathered:
            table.entries = source.entries
        return has_moved

    def seal(self) -> None:
        """Graphs may read the tables from now on."""
        self._sealed = True

    def _of(self, space: Space) -> AdoptedSpace:
        table = next((table for table in self.spaces if table.space == space), None)
        if table is None:
            named = ", ".join(table.space.name for table in self.spaces)
            raise BadTensor(f"no layer lives in the {space.name} space; the spaces are {named}")
        return table

    def _check_device(self, space: Space, source: Source) -> None:
        for tensor in _tensors(source):
            if tensor.device != self.device:
                raise BadTensor(f"the table of the {space.name} space is on {tensor.device}, not on {self.device}")


def _tensors(source: Source) -> list[Tensor]:
    of_kind = source.indptr if isinstance(source, CsrSource) else source.slot_map
    return [source.entries, *([] if of_kind is None else [of_kind])]


def _places(source: Source) -> list[tuple[int, torch.dtype, tuple[int, ...]]]:
    """What a graph has frozen of a table."""
    return [(tensor.data_ptr(), tensor.dtype, tensor.stride()) for tensor in _tensors(source)]


_AXES = "kv", "page", "token", "head", "dim"


def layer_pages(kv: Tensor | Sequence[Tensor], axes: str) -> tuple[tuple[Tensor, Tensor], ...]:
    """K and V pages of each layer as views of an engine's KV cache; ExternalAttention.bind_all says what is what."""
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
                      None where the format has none
    format:           what its pages hold, by whom. Bytes (uint8) do not say it, so of eight bits it must be declared;
                      of others it may be
    """

    k_scale: Tensor | None
    v_scale: Tensor | None
    format: PageFormat


class AdoptedPages:
    """The pages of every layer, which an engine brings.

    problems:     one for each layer
    spaces:       where the pages of each lie
    num_pages:    the most that a layer may have
    page_strides: whether they may have any strides but the last
    binds_calls:  whether a layer may have other pages at each call, so that how many is not known when a step is filled
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
        guards: AdoptedGuards,
    ) -> None:
        self.page_size = problems[0].page_size
        self.device = device
        self._problems = tuple(problems)
        self._num_pages = num_pages
        self._spaces, self._binds_calls = tuple(spaces), binds_calls
        self._fewest = dict.fromkeys(spaces, num_pages)
        # Graphs read it: pages of a layer may be bound anew, and be fewer.
        self._in_every_layer = {
            space: torch.full((1,), num_pages, dtype=torch.int32, device=device) for space in self._fewest
        }
        self._page_strides = page_strides
        self._moved, self._formats = guards.moved, guards.formats
        self._sealed = False
        self._aligned_sides: dict[int, str] = {}
        self._aligned_rows: dict[int, str] = {}
        self._layers: list[LayerPages | None] = [None] * len(problems)
        self.index_pages = AdoptedIndexPages(
            problems, num_pages=num_pages, device=device, moved=guards.moved, formats=guards.formats
        )

    def read_aligned(self, *, sides: Mapping[int, str], rows: Mapping[int, str]) -> None:
        """Layers whose K and V must begin at multiples of 16 bytes, and those whose pages must have aligned rows, each
        with the name of a kernel that reads no others.
        """
        self._aligned_sides.update(sides)
        self._aligned_rows.update(rows)

    def bind(self, layer: int, k: Tensor, v: Tensor, coded: EnginePages | None = None) -> None:
        """Use these pages for a layer; coded: of eight-bit ones, and of others that say what they hold.

        Raises BadTensor, and WrongState where graphs read others.
        """
        k, v = self._declared(layer, k, v, coded)
        self._check(layer, "k", k, key_rows(k).cells, self._problems[layer].head_dim)
        self._check(layer, "v", v, value_rows(v).cells, self._problems[layer].v_head_dim)
        if self._problems[layer].pool is PoolKind.LATENT and (v.data_ptr(), v.stride()) != (k.data_ptr(), k.stride()):
            raise BadTensor(f"layer {layer} is latent: its v is k[..., :{self._problems[layer].v_head_dim}]")
        bound, pages = self._layers[layer], self._pages(layer, k, v, coded)
        self._check_alignment(layer, pages)
        if bound is not None and self._sealed and _place(bound) != _place(pages):
            self._moved(
                f"the pages of layer {layer} have moved, and graphs read the old ones; keep them where they are, or "
                "build anew and capture again"
            )
            return
        self._layers[layer] = pages
        self._count_pages(self._spaces[layer])

    def bind_index(self, layer: int, keys: Tensor, scale: Tensor | None, declared: PageFormat | None) -> None:
        """See AdoptedIndexPages.bind."""
        self.index_pages.bind(layer, keys, scale, declared)
        self._count_pages(self._spaces[layer])

    def in_every_layer(self, space: Space) -> Tensor:
        """int32 [1], on the device: how many pages every layer of a space has, of those that were bound so far."""
        return self._in_every_layer[space]

    def _count_pages(self, space: Space) -> None:
        """A layer of this space has other pages."""
        if self._binds_calls:
            return
        layers = [layer for layer, its in enumerate(self._spaces) if its is space]
        bound = [*(self._layers[layer] for layer in layers), *(self.index_pages.bound(layer) for layer in layers)]
        counts = [side.shape[0] for pages in bound if pages is not None for side in (pages.k, pages.v)]
        fewest = min(self._num_pages, *counts)
        if fewest != self._fewest[space]:
            self._in_every_layer[space].fill_(fewest)
            self._fewest[space] = fewest

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
                    "factors are: bind(layer, k, v, EnginePages(k_scale, v_scale, format))"
                )
            return k, v
        self._formats(f"pages of layer {layer}", coded.format, wanted)
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
            return LayerPages(
                k, v, form, *(scale.view(1) if scale is not None and not scale.dim() else scale for scale in scales)
            )
        except FormatMismatch as error:
            raise BadTensor(f"layer {layer}: {error}") from error

    def layer(self, layer: int) -> LayerPages:
        """The pages of one layer. Raises WrongState while it has none."""
        pages = self._layers[layer]
        if pages is None:
            raise WrongState(f"layer {layer} has no pages yet; call bind() before its first step")
        return pages

    def format(self, layer: int) -> PageFormat:
        """What the pages of a layer must hold to be bound."""
        return self._problems[layer].page_format

    def index(self, layer: int) -> LayerPages:
        """The index pages of a layer that has an indexer. Raises WrongState while it has none."""
        return self.index_pages.layer(layer)

    def seal(self) -> None:
        """Graphs may read the pages from now on."""
        self._sealed = True
        self.index_pages.seal()

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


def _place(pages: LayerPages) -> list[tuple[int, tuple[int, ...]]]:
    """What a graph has frozen of a layer's pages."""
    return [(tensor.data_ptr(), tensor.stride()) for tensor in pages.tensors().values()]
