"""KVExporter and KVImporter copy a request's K and V from pages into a contiguous buffer, and from there into pages.

They serve engines with disaggregated prefill, or with external KV stores. The engine sends the bytes. This module only
gathers and scatters them, by launches on the current stream. Only import_row() waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import is_

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import Integers, as_int32
from rocm_attn.errors import BadBatch, BadTensor, WrongState
from rocm_attn.integrations.kv_passport import (
    ALIGNMENT,
    KVExtent,
    KVPassport,
    LayerPassport,
    Role,
    Stretch,
    require_extent,
    stretches,
)
from rocm_attn.integrations.owners import Owner, clears_tails, given_back, idle, ops_of, pool_of, spaces_of, states_of
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.moved_rows import AlikePages, MovedTokens, page_words, word_dtype
from rocm_attn.kernels.cache.page_format import PoolKind, Scales
from rocm_attn.kernels.cache.page_rows import key_rows, value_rows
from rocm_attn.machine.devices import on_device, require_tensor
from rocm_attn.machine.sending import sent
from rocm_attn.machine.settings import whole_number
from rocm_attn.paging.convert import code_tables, token_factor
from rocm_attn.paging.index_spaces import RESERVED_PAGE, Space, num_pages
from rocm_attn.paging.request_table import RequestTable
from rocm_attn.paging.state_record import RecordHead, num_record_bytes, read_head, read_state, write_record, write_sum
from rocm_attn.providers.launches import MoveRows
from rocm_attn.runtime import AttentionRuntime

# Space -> the page of each page_no of a request. The entry of a page that was given back is 0. It is -1 in an
# engine's table in which page 0 is a page like others.
Pages = Mapping[Space, Integers]
_Listed = Mapping[Space, list[int]]
# Bytes that are recoded at a time. Indexing them takes eight times as much memory.
_RECODED_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class _Alike:
    """The parts that one launch moves: their pages have one layout and space, and their tokens come from one space.

    unit:     tokens per row: 1, or the number that an index key stands for
    parts:    (layer, role) of each part
    """

    space: Space
    unit: int
    parts: tuple[tuple[int, Role], ...]
    pages: AlikePages


class _Mover:
    """The common part of both directions: the parts of an owner's layers, grouped by their layout.

    passport: of the owner's pages
    source:   of the pages that the tokens come from
    """

    @torch.inference_mode(False)  # views that are made in that mode cannot be written outside of it
    def __init__(self, owner: Owner, passport: KVPassport, source: KVPassport) -> None:
        self._owner, self._pool = owner, pool_of(owner)
        self.device = self._pool.device
        self._states = states_of(owner)
        self.passport, self.source = passport, source
        self._spaces = spaces_of(owner)
        self._page_size = self._pool.page_size
        self._gone, self._clears_tails = given_back(owner), clears_tails(owner)
        self._all = tuple(range(len(self._spaces)))
        self._sides = {
            (layer, role): _side(self._pages(layer, role), role)
            for layer in self._all
            for role in self.passport.layers[layer].row_bytes
        }
        self._bound = {part: self._pages(*part) for part in self._sides}
        self._versions = {part: ScaleValues(pages) for part, pages in self._bound.items()}
        self._num_pages = {
            space: min(len(pages.k) for (layer, _), pages in self._bound.items() if self._spaces[layer] == space)
            for space in dict.fromkeys(self._spaces)
        }
        self._alike = {layers: self._put_together(layers) for layers in (self._all, *((each,) for each in self._all))}

    def pages_of(self, row: int, kv_len: int) -> Mapping[Space, list[int]]:
        """Returns the pages of a runtime's row that hold its first kv_len tokens.

        Raises WrongState, BadBatch, and BadSetting for a part of a token.
        """
        table, count = self._runtime.table, num_pages(whole_number("kv_len", kv_len), self._page_size)
        found = {each.space: table.pages_of(row, each.space)[:count].tolist() for each in table.spaces}
        if kv_len < 1 or len(found[Space.FULL]) < count:
            raise BadBatch(f"row {row} has {len(found[Space.FULL])} pages, which do not hold {kv_len} tokens")
        return found

    @property
    def _runtime(self) -> AttentionRuntime:
        if not isinstance(self._owner, AttentionRuntime):
            raise WrongState("the rows of an engine are not known here; give a request's pages for each space")
        return self._owner

    def _only(self, layer: int) -> tuple[int]:
        """Returns one layer's number, as the layers of a call. Raises BadTensor for a layer that does not exist."""
        if layer not in self._all:
            raise BadTensor(f"layer {layer} does not exist; layers are 0 to {len(self._all) - 1}")
        return (layer,)

    def _put_together(self, layers: Sequence[int]) -> tuple[_Alike, ...]:
        found: dict[object, list[tuple[int, Role]]] = {}
        for (layer, role), side in self._sides.items():
            if layer in layers:
                unit = self.passport.layers[layer].key_tokens if role.is_index else 1
                # The source's space counts too: the buffer's rows begin with the first token that the source has in it.
                spaces = self._spaces[layer], self.source.layers[layer].space
                lie = spaces, unit, side.dtype, side.shape[1:], side.stride()
                found.setdefault(lie, []).append((layer, role))
        return tuple(
            _Alike(
                self._spaces[parts[0][0]],
                self.passport.layers[parts[0][0]].key_tokens if parts[0][1].is_index else 1,
                tuple(parts),
                AlikePages.of([self._sides[part] for part in parts]),
            )
            for parts in found.values()
        )

    def _pages(self, layer: int, role: Role) -> LayerPages:
        return self._pool.index(layer) if role.is_index else self._pool.layer(layer)

    def _checked(self, pages: Pages, kv_len: int, layers: Sequence[int]) -> _Listed:
        """Returns the page lists of the layers' spaces.

        Raises BadBatch for wrong ones, and WrongState if pages or scales of the layers have changed.
        """
        if not isinstance(pages, Mapping):
            raise BadBatch(
                f"pages is a {type(pages).__name__}; give the pages of each space, as pages_of() returns them"
            )
        found, count = dict[Space, list[int]](), num_pages(kv_len, self._page_size)
        for space in {self._spaces[layer] for layer in layers}:
            name = f"the list of pages in the space {space.value!r}"
            found[space] = listed = as_int32(name, pages.get(space, ())).tolist()
            gone, most = self._gone[space], self._num_pages[space]
            if len(listed) != count or not listed or listed[-1] == gone:
                raise BadBatch(
                    f"{len(listed)} pages are given in the space {space.value!r}; {kv_len} tokens need {count} "
                    f"pages of {self._page_size}, and the last must not be {gone}, which means none"
                )
            if not min(gone, 0) <= min(listed) <= max(listed) < most:
                raise BadBatch(f"pages from {min(listed)} to {max(listed)} are given; there are {most}")
        for layer in layers:
            for role in self.passport.layers[layer].row_bytes:
                self._must_lie_there(layer, role)
        return found

    def _must_lie_there(self, layer: int, role: Role) -> None:
        """Raises WrongState if an engine has bound other pages since, or a layer has other scales."""
        pages, part = self._pages(layer, role), (layer, role)
        if pages is not self._bound[part]:
            side, was = _side(pages, role), self._sides[part]
            lie = (side.data_ptr(), side.dtype, side.shape[1:], side.stride())
            if len(side) < self._num_pages[self._spaces[layer]] or lie != (
                was.data_ptr(),
                was.dtype,
                was.shape[1:],
                was.stride(),
            ):
                raise WrongState(f"the pages of layer {layer} have moved since this was made; make another one")
            self._bound[part] = pages
        if not ScaleValues(pages).is_like(self._versions[part]):
            raise WrongState(
                f"the scales of layer {layer} have changed since this was made; make another one, and send its "
                "passport again"
            )

    def _buffer(self, buffer: Tensor, num_bytes: int) -> Tensor:
        """Returns the bytes that are used. Raises BadTensor."""
        require_tensor("the buffer", buffer)
        if (
            buffer.dtype != torch.uint8
            or buffer.dim() != 1
            or not buffer.is_contiguous()
            or buffer.device != self.device
        ):
            raise BadTensor(
                f"the buffer is {buffer.dtype} {list(buffer.shape)} on {buffer.device}; give contiguous uint8 [bytes] "
                f"on {self.device}"
            )
        if len(buffer) < num_bytes or buffer.data_ptr() % ALIGNMENT:
            raise BadTensor(
                f"the buffer has {len(buffer)} bytes and begins {buffer.data_ptr() % ALIGNMENT} after a multiple "
                f"of {ALIGNMENT}; give {num_bytes} bytes that begin at a multiple"
            )
        if offset := buffer.storage_offset() % torch.int64.itemsize:  # torch has no view of it as words
            raise BadTensor(
                f"the buffer begins {offset} bytes after a multiple of {torch.int64.itemsize} of the memory that it is "
                f"a view of; let that memory begin at a multiple of {ALIGNMENT}, too"
            )
        return buffer[:num_bytes]

    def _move(
        self,
        launch: MoveRows,
        layers: Sequence[int],
        pages: _Listed,
        parts: Sequence[Stretch],
        first_of: Callable[[Space, int], int],
        buffer: Tensor,
        *,
        clears: bool,
    ) -> None:
        """Launches once for each group of parts with the same layout.

        first_of: (space, unit) -> the row that the pages begin with
        clears:   whether the rest of the last page is written too
        """
        by_part = {(part.layer, part.role): part for part in parts}
        with on_device(self.device):
            for alike in self._alike[tuple(layers)]:
                some, page_rows = by_part[alike.parts[0]], self._page_size // alike.unit
                first, end = first_of(alike.space, alike.unit), some.first + some.num_rows
                if first >= end:
                    continue
                word = alike.pages.sides[0].element_size()
                listed = pages[alike.space][first // page_rows : num_pages(end, page_rows)]
                places = [by_part[part].place // word for part in alike.parts]
                rows = buffer.view(alike.pages.sides[0].dtype)
                until = len(listed) * page_rows + first // page_rows * page_rows if clears else end
                words = sent(np.array(listed + places, np.int64), self.device)
                moved = MovedTokens(words, rows, first, some.first, end, until, len(listed))
                launch(alike.pages, moved)


class KVExporter(_Mover):
    """Copies a request's K and V from the pages of a runtime, or of an engine's layers, into a buffer.

    Everything is launched on the current stream, and nothing waits. If steps run on another stream, the caller must
    synchronise the two. An engine's pages must be bound before, and must not move afterwards.

    model: see KVPassport

    passport: pass it to the receiver's KVImporter
    """

    def __init__(self, owner: Owner, *, model: str = "") -> None:
        passport = KVPassport.of(owner, model=model)
        super().__init__(owner, passport, passport)

    def extent(self, pages: Pages, kv_len: int) -> KVExtent:
        """Returns which of the first kv_len tokens these pages still have. Raises BadBatch, BadSetting."""
        kv_len = whole_number("kv_len", kv_len)
        lists, first = self._checked(pages, kv_len, self._all), {}
        table = self._owner.table if isinstance(self._owner, AttentionRuntime) else None
        row = _row_of(table, lists, set(self._spaces)) if table is not None else None
        for space in dict.fromkeys(self._spaces):
            gone = np.flatnonzero(np.array(lists[space]) == self._gone[space])
            first[space.value] = (int(gone[-1]) + 1 if len(gone) else 0) * self._page_size
            if table is not None and row is not None:  # kept pages are whole
                first[space.value] = max(first[space.value], int(table.space(space).first_token[row]))
        return KVExtent(kv_len, first)

    def num_bytes(self, extent: KVExtent) -> int:
        """Returns the size in bytes of a buffer for all layers, recurrent ones included, and the checksum.

        Raises BadTensor.
        """
        return _num_bytes(stretches(self.passport, extent, self._all)) + num_record_bytes(self._states)

    def num_layer_bytes(self, extent: KVExtent, layer: int) -> int:
        """Returns the size in bytes of a buffer for one layer. Raises BadTensor."""
        return _num_bytes(stretches(self.passport, extent, self._only(layer)))

    def export_row(self, row: int, kv_len: int, buffer: Tensor) -> KVExtent:
        """Copies the first kv_len tokens of a runtime's row into a buffer, without those that have left a window.

        A checksum follows, and the recurrent state after these tokens.

        buffer: uint8 [num_bytes(extent) or more], contiguous, on the device, at a multiple of 16 bytes
        Raises BadBatch for tokens that are not stored, or without a state after them; BadTensor; WrongState, also while
        a step runs that may write states.
        """
        pages = self.pages_of(row, kv_len)
        extent = self.extent(pages, kv_len)
        # Another row with these pages may have more tokens in the last one.
        self._must_have_stored(row, self._all, kv_len)
        used = self._buffer(buffer, self.num_bytes(extent))
        if self._states.is_empty:
            self.export(pages, extent, used)
            write_sum(self._states, extent.kv_len, used)
            return extent
        with idle(self._owner, "states cannot be exported"):
            source = self._runtime.table.states.source_of(row, kv_len)
            self.export(pages, extent, used)
            write_record(self._states, source, used)
        return extent

    def export(self, pages: Pages, extent: KVExtent, buffer: Tensor) -> None:
        """Copies the tokens of an extent into a buffer, for all layers except recurrent ones.

        pages: for a runtime, the pages of a row, or kept pages
        Raises BadBatch for tokens of a runtime that are not stored, BadTensor, WrongState.
        """
        self._export(self._all, pages, extent, buffer)

    def export_layer(self, layer: int, pages: Pages, extent: KVExtent, buffer: Tensor) -> None:
        """Like export(), for one layer with its own buffer, for instance while later layers still compute."""
        self._export(self._only(layer), pages, extent, buffer)

    def _export(self, layers: Sequence[int], pages: Pages, extent: KVExtent, buffer: Tensor) -> None:
        parts = stretches(self.passport, extent, layers)
        lists = self._checked(pages, extent.kv_len, layers)
        if isinstance(self._owner, AttentionRuntime):
            lists = self._stored(self._owner, layers, lists, extent.kv_len)
        for space in {self._spaces[layer] for layer in layers}:
            if self._gone[space] in lists[space][extent.first[space.value] // self._page_size :]:
                raise BadBatch(f"pages of the space {space.value!r} that the extent names were released; make it again")
        used = self._buffer(buffer, _num_bytes(parts))

        def first_of(space: Space, unit: int) -> int:
            return extent.first[space.value] // unit

        self._move(ops_of(self._owner).export_rows, layers, lists, parts, first_of, used, clears=False)

    def _stored(self, runtime: AttentionRuntime, layers: Sequence[int], pages: _Listed, kv_len: int) -> _Listed:
        """Returns the pages that hold the tokens. For a page whose copy is pending, it is the page to copy from.

        Raises BadBatch unless a row with these pages has stored that many tokens in these layers, or all are kept.
        """
        table, spaces = runtime.table, {self._spaces[layer] for layer in layers}
        row = _row_of(table, pages, spaces)
        if row is not None:
            self._must_have_stored(row, layers, kv_len)
        elif not all(table.kept.are_kept(pages[space], space) for space in spaces):
            raise BadBatch("no row has these pages, and not all of them are kept; give those of pages_of()")
        copies = {space: table.space(space).pending.copies for space in spaces}
        return {space: [copies[space].get(page, page) for page in pages[space]] for space in spaces}

    def _must_have_stored(self, row: int, layers: Sequence[int], kv_len: int) -> None:
        """Raises BadBatch unless a row of the runtime has stored that many tokens in these layers."""
        runtime = self._runtime
        stored = max(int(runtime.table.tokens.stored_len[row]), runtime.gate.stored_now(row, layers))
        if kv_len > stored:
            raise BadBatch(f"row {row} has {stored} stored tokens; {kv_len} of them cannot be sent")


class KVImporter(_Mover):
    """Copies K and V from a buffer of KVExporter into the pages of a runtime, or of an engine's layers.

    source: the passport of the sender
    model:  see KVPassport

    Eight-bit values with another encoding or other scales are rounded to the nearest codes of this side
    (rocm_attn/paging/convert.py). Everything is launched on the current stream, as by KVExporter.

    is_exact: whether every eight-bit value stays the same, except NaN, which becomes 0
    Raises BadTensor with every reason if tokens of the source cannot be stored here.
    """

    def __init__(self, owner: Owner, source: KVPassport, *, model: str = "") -> None:
        passport = KVPassport.of(owner, model=model)
        if reasons := passport.refusals(source):
            raise BadTensor("\n  - ".join(("tokens of this source cannot be stored here", *reasons)))
        super().__init__(owner, passport, source)
        self.is_exact = True
        self._codes: dict[tuple[int, Role], Tensor] = {}
        self._scale_values: dict[tuple[int, Role], float] = {}
        for number, (there, here) in enumerate(zip(source.layers, self.passport.layers, strict=True)):
            for role in here.row_bytes:
                self._learn(number, role, there, here)

    def admit(self, extent: KVExtent) -> int:
        """Admits a row with pages for an extent; in the SWA space, only for tokens that the window still sees.

        Raises OutOfRows, OutOfPages, NeverFits, BadTensor. Then nothing has changed.
        """
        require_extent(extent)
        table = self._runtime.table
        row = table.admit()
        try:
            # A length from elsewhere may fit no int32. reserve() refuses one that no row holds.
            table.evict([row], [min(extent.kv_len, table.max_kv_len)])
            table.reserve(row, extent.kv_len)
        except BaseException:
            table.free(row)
            raise
        return row

    def import_row(self, row: int, extent: KVExtent, buffer: Tensor) -> None:
        """Copies an extent into a row's pages, for all layers, and marks its tokens as stored.

        It waits for the device, to verify the checksum; import_pages() and then table.mark_stored() do not.

        row: a row from admit(), which shares no pages, and in which no step has stored
        buffer: a buffer that KVExporter.export_row() filled
        Raises BadBatch, BadTensor, WrongState. Then nothing was written.
        """
        require_extent(extent)
        pages, room = self.pages_of(row, extent.kv_len), int(self._runtime.table.room([row])[0])
        if extent.kv_len > room:
            raise BadBatch(f"row {row} has room for {room} tokens, and {extent.kv_len} were sent; reserve() it first")
        with idle(self._owner, "KV cannot be imported"):
            num_bytes = _num_bytes(stretches(self.source, extent, self._all)) + num_record_bytes(self._states)
            used = self._buffer(buffer, num_bytes)
            head = read_head(self._states, used)
            self._runtime.guards.table.sent_state(head, extent.kv_len, self._states.recurrent.kept)
            self._import_idle(self._all, pages, extent, used)
            self._runtime.table.mark_stored([row], [extent.kv_len])
            if not self._states.is_empty:
                self._take_state(row, extent, head, used)

    def _take_state(self, row: int, extent: KVExtent, head: RecordHead, used: Tensor) -> None:
        """Gives a row the state of a record."""
        of_row, kv_len = np.array([row], np.int32), np.array([extent.kv_len], np.int32)
        slots, headers = self._runtime.table.states.give(self._states, of_row, kv_len)
        headers[:, 2] = head.folded  # the next step folds the others, which are kept next to the state
        read_state(self._states, int(slots[0]), torch.from_numpy(headers[0]), used)

    def import_pages(self, pages: Pages, extent: KVExtent, buffer: Tensor) -> None:
        """Copies an extent into pages, for all layers except recurrent ones.

        Tokens of the first page that were not sent become 0. So does the rest of the last page, unless
        ExternalOptions.zero_tails is False.

        pages: for a runtime, the pages of a row from admit() in which no step has stored
        Raises BadBatch, BadTensor, WrongState. Then nothing was written.
        """
        self._import(self._all, pages, extent, buffer)

    def import_layer(self, layer: int, pages: Pages, extent: KVExtent, buffer: Tensor) -> None:
        """Like import_pages(), for one layer. After the last layer, call table.mark_stored() for a runtime's row."""
        self._import(self._only(layer), pages, extent, buffer)

    def _import(self, layers: Sequence[int], pages: Pages, extent: KVExtent, buffer: Tensor) -> None:
        # A step that has begun may still store in pages that its rows have given back.
        with idle(self._owner, "KV cannot be imported"):
            self._import_idle(layers, pages, extent, buffer)

    def _import_idle(self, layers: Sequence[int], pages: Pages, extent: KVExtent, buffer: Tensor) -> None:
        parts = stretches(self.source, extent, layers)
        lists = self._checked(pages, extent.kv_len, layers)
        begins = {space: self._begin(space, lists) for space in {self._spaces[layer] for layer in layers}}
        for part in parts:
            self._must_see(part, extent, begins[self._spaces[part.layer]])
        if isinstance(self._owner, AttentionRuntime):
            row = _must_be_own(self._owner.table, lists, begins)
            self._must_go_back(self._owner.table, layers, extent)
        used = self._recoded(self._buffer(buffer, _num_bytes(parts)), parts)
        if isinstance(self._owner, AttentionRuntime):
            self._owner.table.states.begin(row)  # its slots may have that of other tokens, which were taken back
            for layer in layers:
                pages_here = self._owner.table.space(self._spaces[layer])
                sent_from = extent.first[self.source.layers[layer].space]
                pages_here.lack(row, max(sent_from, int(pages_here.first_token[row])))

        def first_of(space: Space, unit: int) -> int:
            return begins[space] // unit

        clears = self._clears_tails
        self._move(ops_of(self._owner).import_rows, layers, lists, parts, first_of, used, clears=clears)

    def _begin(self, space: Space, pages: _Listed) -> int:
        """Returns the first token that has a page. Raises BadBatch for a hole or a repeated page."""
        listed, gone = pages[space], self._gone[space]
        first = next(at for at, page in enumerate(listed) if page != gone)
        if gone in listed[first:] or len(set(listed[first:])) < len(listed) - first:
            raise BadBatch(f"page {gone} or a repeated page is among those of the space {space.value!r}")
        return first * self._page_size

    def _must_see(self, part: Stretch, extent: KVExtent, begin: int) -> None:
        """Raises BadBatch if later steps need tokens that were not sent, or that have no page here."""
        layer = self.passport.layers[part.layer]
        needed = max(0, extent.kv_len - layer.window_left) if layer.window_left >= 0 else 0
        sent = extent.first[self.source.layers[part.layer].space]
        if max(sent, begin) > needed:
            raise BadBatch(
                f"layer {part.layer} sees tokens from {needed} on; the sender has tokens from {sent} on, and the "
                f"pages here from {begin} on"
            )

    def _must_go_back(self, table: RequestTable, layers: Sequence[int], extent: KVExtent) -> None:
        """Raises BadBatch if tokens were not sent that a row must keep for going back."""
        kept_from = {each.space: each.pages.first_needed(extent.kv_len, 1) for each in table.spaces}
        for layer in layers:
            space = self._spaces[layer]
            sent = extent.first.get(self.source.layers[layer].space, 0)
            if space != Space.FULL and sent > kept_from[space]:
                raise BadBatch(
                    f"rows keep tokens from {kept_from[space]} on in the {space.name} space, and the sender has "
                    f"those from {sent} on; use the same swa_kept on both sides"
                )

    def _learn(self, number: int, role: Role, there: LayerPassport, here: LayerPassport) -> None:
        """Prepares the conversion of a part of a layer, if it needs one."""
        source, own = there.form_of(role), here.form_of(role)
        of_tokens = token_factor(source.encoding, own.encoding)
        if not role.is_codes:
            if of_tokens != 1.0:
                self._scale_values[number, role] = of_tokens
            return
        at = 2 if role.is_index else (Role.K, Role.V).index(role)
        given, target = there.scale_values[at], here.scale_values[at]
        if not own.encoding.is_fp8 or (source.encoding == own.encoding and given == target):
            return
        ratio = torch.full((own.num_kv_heads,), 1.0, dtype=torch.float64)
        if own.scales is Scales.TOKEN:
            ratio /= of_tokens
        elif given:
            # The scales are float32 numbers.
            ratio *= torch.tensor(given, dtype=torch.float64) / torch.tensor(target, dtype=torch.float64)
        codes, is_exact = code_tables(source.encoding, own.encoding, ratio)
        self.is_exact &= is_exact
        self._codes[number, role] = codes.flatten().to(self.device)

    def _recoded(self, buffer: Tensor, parts: Sequence[Stretch]) -> Tensor:
        """Returns the buffer with the codes and scales of this side: itself if nothing changes, else a copy."""
        if not any((part.layer, part.role) in self._codes | self._scale_values for part in parts):
            return buffer
        buffer = buffer.clone()
        for part in parts:
            stretch, at = buffer[part.place : part.end], (part.layer, part.role)
            if not part.num_rows:  # the part holds no index key: the tokens of the first one are not complete
                continue
            if at in self._codes:
                heads = self.source.layers[part.layer].form_of(part.role).num_kv_heads
                codes = stretch.view(part.num_rows, heads, part.row_bytes // heads)
                head = torch.arange(heads, device=self.device)[:, None] * 256
                for some in torch.split(codes, max(1, _RECODED_AT_ONCE // part.row_bytes)):
                    some.copy_(self._codes[at].take(some.long() + head))
            elif at in self._scale_values:
                stretch.view(torch.float32).mul_(self._scale_values[at])
        return buffer


def _row_of(table: RequestTable, pages: _Listed, spaces: Collection[Space]) -> int | None:
    for_rows = np.ones(len(table.full.entries_host), np.bool_)
    for space in spaces:
        listed, entries = np.array(pages[space], np.int32), table.space(space).entries_host
        if len(listed) > entries.shape[1]:
            return None
        for_rows &= entries[:, len(listed) - 1] == listed[-1]  # few rows have that page
        rows = np.flatnonzero(for_rows)
        for_rows[rows] = (entries[rows, : len(listed)] == listed).all(axis=1)
    found = np.flatnonzero(for_rows)
    return int(found[0]) if len(found) else None


def _must_be_own(table: RequestTable, pages: _Listed, spaces: Collection[Space]) -> int:
    """Returns the row. Raises BadBatch unless these are its pages, no other row shares any, and none holds a token."""
    row = _row_of(table, pages, spaces)
    if row is None:
        raise BadBatch("no row has these pages; import into the pages of a row from admit()")
    for each in map(table.space, spaces):
        if not each.may_be_written(np.array([page for page in pages[each.space] if page != RESERVED_PAGE], np.int32)):
            raise BadBatch(
                f"row {row} shares pages with others, which must not be written; import into a row from admit()"
            )
    stored = int(table.tokens.stored_len[row])
    if stored:
        raise BadBatch(f"row {row} has {stored} stored tokens already; import into a row from admit()")
    return row


def _num_bytes(parts: Sequence[Stretch]) -> int:
    return -(-parts[-1].end // ALIGNMENT) * ALIGNMENT


class ScaleValues:
    """The scales of a layer or its heads at the time when this was made.

    It holds the tensors themselves, because a new tensor may get the address and the id() of one that was freed.
    """

    def __init__(self, pages: LayerPages) -> None:
        of_layer = pages.format.scales in (Scales.LAYER, Scales.HEAD)
        self._tensors = [each for each in (pages.k_scale, pages.v_scale) if of_layer and each is not None]
        self._versions = [0 if each.is_inference() else each._version for each in self._tensors]

    def is_like(self, other: ScaleValues) -> bool:
        """True if both hold the same tensors, and none was written in between."""
        return self._versions == other._versions and all(map(is_, self._tensors, other._tensors))


def _memory(pages: LayerPages, role: Role) -> Tensor:
    memory = {
        Role.K: pages.raw_k,
        Role.V: pages.raw_v,
        Role.K_FACTORS: pages.k_scale,
        Role.V_FACTORS: pages.v_scale,
        Role.INDEX: pages.raw_k,
        Role.INDEX_FACTORS: pages.k_scale,
    }[role]
    assert memory is not None
    return memory


def _side(pages: LayerPages, role: Role) -> Tensor:
    """Returns a part of a layer in the form that AlikePages needs."""
    memory = _memory(pages, role)
    if not role.is_codes:  # [pages, heads, tokens]
        return memory.view(torch.int32).transpose(1, 2)[:, :, None, None]
    words = memory.view(word_dtype(memory) if pages.format.kind is not PoolKind.VECTORIZED else _of_size(memory))
    return page_words(value_rows(words) if role is Role.V else key_rows(words))


def _of_size(memory: Tensor) -> torch.dtype:
    """Returns words of the size of an element: those of a vectorised V row are not next to each other."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[memory.element_size()]
