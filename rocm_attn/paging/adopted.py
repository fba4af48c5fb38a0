"""AdoptedTables: block tables that an engine owns, in the form that kernels read.

Kernels read a suitable table of page ids in place. Any other table is gathered for each step into a table of this
module's own: a table of slots of larger pages, of another space or dtype, or lists of pages. There sequence i has row
i + 1, and row 0 stays 0. If one space is gathered, all are, because a sequence has the same row in all of them.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import INT32_MAX, as_int32
from rocm_attn.errors import BadBatch, BadTensor, NeverFits, WrongState
from rocm_attn.kernels.cache.page_format import PageFormat
from rocm_attn.kernels.metadata.engine_tensors import EngineRows, GatherSource
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS, TableTerms
from rocm_attn.machine.devices import require_tensor
from rocm_attn.machine.settings import require_kind
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import UNLIMITED_WINDOW, Problem

_INTEGERS = (torch.int32, torch.int64)


class TableUnit(enum.Enum):
    """The meaning of an entry in an engine's table: a page id, or a slot id."""

    PAGE = "page"
    SLOT = "slot"


@dataclass(frozen=True, slots=True)
class TableSource:
    """An engine's block table: a row of page ids per request, or of slot ids, one per token (req_to_token).

    entries:   int32 or int64 [rows, width], any strides. Entry j of a row is the sequence's page j, or the slot of its
               token j; 0 if that page was freed. The slots of a page are consecutive, from a multiple of the page size
               on
    unit:      the meaning of the entries
    slot_map:  int32 or int64 [slots], slot in the table -> slot of this space, 0 for one that was freed; None: the
               table has slots of this space
    null_page: True if page 0 is a null page, which belongs to no request; if not, it is a page like others
    copied:    True if begin() copies the step's rows, so that the engine may write to the table after the event
               tables.copied. If not, it is read in fill(), or in place until the step's last layer. slot_map is read in
               fill() too, if slots are passed there

    Raises BadTensor.
    """

    entries: Tensor
    unit: TableUnit = TableUnit.PAGE
    slot_map: Tensor | None = None
    null_page: bool = True
    copied: bool = False

    def __post_init__(self) -> None:
        _check_integers("entries", self.entries, 2)
        if self.slot_map is not None:
            _check_integers("slot_map", self.slot_map, 1)
        require_kind("unit", self.unit, TableUnit, BadTensor)
        _check_flags(self)

    @property
    def gather(self) -> GatherSource:
        return GatherSource(self.entries, self.unit is TableUnit.SLOT, None, self.slot_map)


@dataclass(frozen=True, slots=True)
class CsrSource:
    """An engine's page lists in CSR form, like FlashInfer's.

    indptr:    int32 or int64 [rows + 1], any stride; row -> its first entry in indices
    indices:   int32 or int64 [n], any stride; page ids
    null_page, copied: see TableSource

    Raises BadTensor.
    """

    indptr: Tensor
    indices: Tensor
    null_page: bool = False
    copied: bool = False

    def __post_init__(self) -> None:
        _check_integers("indptr", self.indptr, 1)
        _check_integers("indices", self.indices, 1)
        if self.indptr.shape[0] < 2:
            raise BadTensor(f"indptr has {self.indptr.shape[0]} elements; it needs one more than rows, so at least 2")
        _check_flags(self)

    @property
    def gather(self) -> GatherSource:
        return GatherSource(self.indices, csr_indptr=self.indptr)


Source = TableSource | CsrSource


def _check_flags(source: Source) -> None:
    for name in ("null_page", "copied"):
        require_kind(name, getattr(source, name), bool, BadTensor)


def _check_integers(name: str, tensor: Tensor, dims: int) -> None:
    require_tensor(name, tensor)
    if tensor.dim() != dims or tensor.dtype not in _INTEGERS or 0 in tensor.shape:
        raise BadTensor(
            f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be int32 or int64 with {dims} dimensions, and "
            "not empty"
        )


def refuse_moved_table(reason: str) -> None:
    """Refuses another table, because graphs would still read the old one. Raises WrongState."""
    raise WrongState(reason)


def refuse_other_formats(pages: str, declared: PageFormat, wanted: PageFormat) -> None:
    """Refuses another format, because kernels would read finite but wrong numbers. Raises BadTensor."""
    if declared != wanted:
        raise BadTensor(
            f"the {pages} hold {declared}; their kernels need {wanted}. Build the layer with a Problem of the "
            "engine's format"
        )


@dataclass(frozen=True, slots=True)
class AdoptedGuards:
    """The safeguards of tables and pages that an engine owns.

    moved:   called with a sentence if a table or pages that graphs read are replaced
    terms:   changes the owner's terms of a space's table: page 0 belongs to no request, or is a page like others
    formats: called with a layer's pages in words, the format that an engine declares, and the one that kernels need
    """

    moved: Callable[[str], None] = refuse_moved_table
    terms: Callable[[TableTerms], TableTerms] = lambda terms: terms
    formats: Callable[[str, PageFormat, PageFormat], None] = refuse_other_formats


class ChangeGate(Protocol):
    """The part of ExternalGate (step/external_layers.py) that tables and pages ask before they change."""

    guards: AdoptedGuards
    is_sealed: bool

    def change(self, call: str) -> None: ...

    def drop_unfilled(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Reach:
    """The keys that queries of a space's layers may see; an engine may free the pages of all others.

    window_left: previous keys that the layer with the longest window sees; ALL_KEYS: all
    chunk:       keys in a chunk, if all layers have equal chunks; else ALL_KEYS
    spans_pass:  whether a layer sees all of a step's spans, even the part before its window
    """

    window_left: int
    chunk: int
    spans_pass: bool

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> Reach:
        """The reach of these layers."""
        windows, chunks = ({getattr(problem, name) for problem in problems} for name in ("window_left", "chunk"))
        chunk = chunks.pop() if len(chunks) == 1 else 0
        spans_pass = any(problem.spans_pass_window for problem in problems)
        return cls(ALL_KEYS if UNLIMITED_WINDOW in windows else max(windows), chunk or ALL_KEYS, spans_pass)


@dataclass(slots=True)
class AdoptedSpace:
    """The table of one space, in the form that kernels read, and the reach of its layers.

    source:  the engine's table
    gather:  the same, in the form of the kernel that gathers
    entries: int32 [rows, width]: the engine's own, or the table into which a step's pages are gathered
    """

    space: Space
    window_left: int
    chunk: int
    spans_pass: bool
    terms: TableTerms
    source: Source
    gather: GatherSource
    entries: Tensor


class AdoptedTables:
    """An engine's block tables, one for every space that a layer uses: ExternalAttention.tables.

    sources:    space -> table, in the order of the spaces
    reaches:    space -> the keys that queries of its layers may see
    max_kv_len: tokens of the longest sequence
    num_seqs:   padded sequences of the largest step
    short_kv:   True if a sequence may have fewer tokens in its KV than new tokens
    pads_have_kv: whether kernels read a page of pads: row 0, which no request may have then, leads to page 0
    rows:       the rows that every table has now
    Raises BadTensor for a table on another device.
    """

    def __init__(
        self,
        sources: Mapping[Space, Source],
        reaches: Mapping[Space, Reach],
        *,
        page_size: int,
        max_kv_len: int,
        num_seqs: int,
        short_kv: bool,
        pads_have_kv: bool,
        device: torch.device,
        gate: ChangeGate,
    ) -> None:
        self.page_size, self.device, self._gate = page_size, device, gate
        self.short_kv, self.changes, self.most_rows = short_kv, 0, INT32_MAX
        self.gathered = pads_have_kv or not all(_lies_right(source, page_size) for source in sources.values())
        self.max_kv_len = min(max_kv_len, *(_row_tokens(source.gather, page_size) for source in sources.values()))
        self.width = -(-self.max_kv_len // page_size)
        spaces = []
        for space, source in sources.items():
            self._check_device(space, source.gather)
            own = torch.zeros((num_seqs + 1, self.width), dtype=torch.int32, device=device) if self.gathered else None
            terms = gate.guards.terms(TableTerms(source.null_page, short_kv))
            entries = source.gather.entries if own is None else own
            reach = reaches[space]
            spaces.append(
                AdoptedSpace(
                    space, reach.window_left, reach.chunk, reach.spans_pass, terms, source, source.gather, entries
                )
            )
        self.spaces = tuple(spaces)
        gathered = self.spaces if self.gathered else ()
        self.gathered_in_begin = tuple(table for table in gathered if table.source.copied)
        self.gathered_in_fill = tuple(table for table in gathered if not table.source.copied)
        # A CPU's event is never recorded, and such an event counts as reached.
        self._copied = torch.Event(device)
        self.rows = EngineRows(0, torch.empty(0, dtype=torch.int32, device=device))
        self._make_room(max(_num_rows(table.gather) for table in self.spaces))
        self._count_rows()

    @property
    def copied(self) -> torch.Event:
        """The event after which the engine may write to its copied tables; begin() records it.

        copied.wait(stream) makes a stream wait for it, copied.synchronize() the host. Raises WrongState if no table is
        copied.
        """
        if not self.gathered_in_begin:
            raise WrongState(
                "no table is copied, so each is read until the last layer of its step; build with "
                "TableSource(copied=True)"
            )
        return self._copied

    def note_copies(self) -> None:
        """Records `copied` on the current stream."""
        if self.device.type == "cuda":
            self._copied.record()

    def write(self, pages: Sequence[Sequence[int]], space: Space = Space.FULL) -> None:
        """Writes page ids into the engine's table: pages[i] becomes the beginning of row i, and zeros follow it.

        They end where the longest of the lists ends; the rest of the table stays.
        It makes one copy to the device, on the current stream, and does not wait. Raises WrongState while another
        thread has a step, BadTensor if pages do not fit or the table has no rows of page ids, and BadBatch for pages
        that are no integers, or outside of int32; nothing is written then.
        """
        self._gate.change("tables.write()")
        source = self._of(space).source
        if not isinstance(source, TableSource) or source.unit is not TableUnit.PAGE:
            raise BadTensor(f"the table of the {space.name} space has no rows of pages; write into it yourself")
        try:
            entries, lens = source.entries, np.array([len(row) for row in pages], np.int64)
        except TypeError:  # a number has no length
            raise BadBatch(f"pages is {pages!r}; give a list of page ids for each row") from None
        width = int(lens.max(initial=0))
        if len(pages) > entries.shape[0] or width > entries.shape[1]:
            raise BadTensor(
                f"{len(pages)} rows of up to {width} pages do not fit the table of the {space.name} space, "
                f"{list(entries.shape)}; give it more rows or columns"
            )
        if width:
            numbers = as_int32("pages", list(itertools.chain.from_iterable(pages)))
            cells = torch.zeros((len(pages), width), dtype=entries.dtype, pin_memory=self.device.type == "cuda")
            cells.numpy()[np.arange(width) < lens[:, None]] = numbers
            entries[: len(pages), :width].copy_(cells, non_blocking=True)

    def use(self, source: Source | Tensor, space: Space = Space.FULL) -> None:
        """Sets the table that a space reads from the next begin() on. A step that was begun and not filled is dropped.

        source: a longer or shorter table at the same address counts as the same table; a tensor: only new entries
        Raises BadTensor for one of another kind, NeverFits, and WrongState if graphs read another, or while another
        thread has a step.
        """
        self._gate.change("tables.use()")
        table, named = self._of(space), f"the table of the {space.name} space"
        old = table.source
        if isinstance(source, Tensor):
            if isinstance(old, CsrSource):
                raise BadTensor(f"{named} is a list of pages; give a CsrSource")
            source = replace(old, entries=source)
        if not isinstance(source, type(old)):
            raise BadTensor(f"{named} is a {type(source).__name__}; give a tensor, or a {type(old).__name__} as before")
        gather = source.gather
        self._check_device(space, gather)
        if (source.null_page, source.copied) != (old.null_page, old.copied):
            raise BadTensor(f"{named} is of another kind than the table before; build anew")
        if not self.gathered and not _lies_right(source, self.page_size):
            raise BadTensor(
                f"{named} is read in place, which needs int32 pages in rows without gaps; it is "
                f"{gather.entries.dtype} with strides {gather.entries.stride()}"
            )
        room, num_rows = _row_tokens(gather, self.page_size), _num_rows(gather)
        if room < self.max_kv_len:
            raise NeverFits(f"a row of {named} has room for {room} tokens; sequences may have {self.max_kv_len}")
        if num_rows > self.most_rows:
            raise NeverFits(
                f"{named} has {num_rows} rows, and {self.most_rows} are watched; build with the largest table"
            )
        if self._gate.is_sealed and _places(gather) != _places(table.gather):
            self._gate.guards.moved(
                f"{named} has moved, and graphs read the old one; write into the old table, or build anew and "
                "capture again"
            )
        self._make_room(num_rows)  # memory may run out, and nothing has changed then
        self._gate.drop_unfilled()
        table.source, table.gather = source, gather
        if not self.gathered:
            table.entries = gather.entries
        self._count_rows()
        self.changes += 1

    def _make_room(self, num_rows: int) -> None:
        """Makes room for the numbers of steps that stored in the rows of a table."""
        if num_rows > len(self.rows.named):
            with torch.inference_mode(False):  # memory that is made in that mode cannot be written outside of it
                # No step has a negative number, so no row counts as named.
                self.rows.named = torch.full((num_rows,), -1, dtype=torch.int32, device=self.device)

    def _count_rows(self) -> None:
        """Sets the rows that sequences may have: those that every table has."""
        tables = [table.gather for table in self.spaces]
        self.rows.num = min(map(_num_rows, tables))
        self.rows.csr_indptr = next((table.csr_indptr for table in tables if table.csr_indptr is not None), None)

    def _of(self, space: Space) -> AdoptedSpace:
        table = next((table for table in self.spaces if table.space == space), None)
        if table is None:
            named = ", ".join(table.space.name for table in self.spaces)
            raise BadTensor(
                f"no layer lives in the {getattr(space, 'name', repr(space))} space; the spaces are {named}"
            )
        return table

    def _check_device(self, space: Space, table: GatherSource) -> None:
        for tensor in _tensors(table):
            if tensor.device != self.device:
                raise BadTensor(f"the table of the {space.name} space is on {tensor.device}, not on {self.device}")


def _lies_right(source: Source, page_size: int) -> bool:
    """True if kernels can read a table in place."""
    table = source.gather
    if table.csr_indptr is not None or table.slot_map is not None or source.copied:
        return False
    in_order = table.entries.dtype == torch.int32 and table.entries.stride(1) == 1
    return in_order and (not table.has_slots or page_size == 1)


def _num_rows(table: GatherSource) -> int:
    return table.entries.shape[0] if table.csr_indptr is None else table.csr_indptr.shape[0] - 1


def _row_tokens(table: GatherSource, page_size: int) -> int:
    """Tokens that a row has room for; a list ends with its sequence."""
    if table.csr_indptr is not None:
        return INT32_MAX
    return table.entries.shape[1] * (1 if table.has_slots else page_size)


def _tensors(table: GatherSource) -> list[Tensor]:
    return [each for each in (table.entries, table.csr_indptr, table.slot_map) if each is not None]


def _places(table: GatherSource) -> list[tuple[object, ...]]:
    """The properties of a table that a graph has frozen.

    The graph reads no row that begin() has not checked, but it reads lists and maps to their end.
    """
    places: list[tuple[object, ...]] = [(each.data_ptr(), each.dtype, each.stride()) for each in _tensors(table)]
    to_the_end = table.slot_map if table.csr_indptr is None else table.entries
    return places if to_the_end is None else [*places, tuple(to_the_end.shape)]
