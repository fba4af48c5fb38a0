"""Keeps: full pages that stay when their row is freed, and rows that begin over them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np

from rocm_attn.batch.step_batch import Int32Array, Integers, as_int32
from rocm_attn.errors import BadBatch, WrongState
from rocm_attn.paging.index_spaces import RESERVED_PAGE, Space, num_pages
from rocm_attn.paging.kept_pages import GivenIds, IsKept, KeptIds, KeptPages
from rocm_attn.paging.rows import Rows

# All that a table may have.
EVERY_SPACE: Final[tuple[Space, ...]] = (Space.FULL, Space.SWA)


class Keeps:
    """The kept pages of a request table: RequestTable.kept.

    max_kv_len: tokens that a row may have
    is_kept:    which ids are taken for kept
    """

    def __init__(self, rows: Rows, max_kv_len: int, is_kept: IsKept) -> None:
        self._rows, self._max_kv_len = rows, max_kv_len
        self._pages = KeptPages(len(rows.spaces), is_kept)

    def ids(self) -> KeptIds:
        """int64 [n]: all ids that are kept, so that a caller can tell whether it has lost some."""
        return self._pages.ids()

    def are_kept(self, pages: Sequence[int], space: Space) -> bool:
        """Whether all of these pages of a space are kept; 0 stands for none. Raises BadSetting."""
        kept = self._pages.of_space(self._rows.spaces.index(self._rows.space(space)))
        return bool(np.isin(pages, np.append(kept, RESERVED_PAGE)).all())

    def keep(self, row: int, first_page_no: int, end_page_no: int, spaces: Collection[Space] = EVERY_SPACE) -> KeptIds:
        """Keep the pages [first_page_no, end_page_no) of row until drop(), whatever becomes of row.

        Row does not store in them again: to compute some of their tokens again, truncate() it. A page may be kept
        several times, under an id for each.

        spaces: in which a page is kept; those that the table does not have do not count
        Returns int64 [n] ids, one for each page_no.
        Raises WrongState, and BadBatch for a page that is not full of stored tokens, or has left a window; nothing is
        changed then. A length that only the device knows counts by its bound: keep what is known to be stored.
        """
        self._rows.must_be_admitted(row)
        if not 0 <= first_page_no <= end_page_no:
            raise BadBatch(f"pages [{first_page_no}, {end_page_no}) were to be kept; the range is not one of pages")
        page_no = np.arange(first_page_no, end_page_no, dtype=np.int32)
        return self.keep_all(np.full(len(page_no), row, np.int32), page_no, spaces)

    def keep_all(self, rows: Integers, page_no: Integers, spaces: Collection[Space] = EVERY_SPACE) -> KeptIds:
        """keep(rows[i], page_no[i], page_no[i] + 1) for every i, or for none. A row may be named several times.

        rows, page_no: integers [n]
        """
        if len(rows) == 0:
            return np.empty(0, np.int64)
        return self._keep(as_int32("rows", rows), as_int32("page_no", page_no), spaces)

    def _keep(self, rows: Int32Array, page_no: Int32Array, spaces: Collection[Space]) -> KeptIds:
        self._rows.must_all_be_admitted(rows)
        stored_len, kv_len = self._rows.tokens.of(rows), (page_no + 1) * self._rows.page_size
        wrong = (kv_len > stored_len) | (page_no < 0)
        if wrong.any():
            at = int(wrong.argmax())
            raise BadBatch(
                f"row {rows[at]} has {stored_len[at]} stored tokens, which fill the pages before page_no "
                f"{stored_len[at] // self._rows.page_size}; page_no {page_no[at]} cannot be kept"
            )
        named = [table.space in spaces for table in self._rows.spaces]
        for table, is_named in zip(self._rows.spaces, named, strict=True):
            if is_named:
                table.must_hold(rows, page_no)
        self._rows.generations.share(rows)
        self._rows.tokens.raise_floor(rows, kv_len)
        pages = np.zeros((len(self._rows.spaces), len(rows)), np.int32)
        for space, table in enumerate(self._rows.spaces):
            if named[space]:
                pages[space] = table.keep(rows, page_no)
        return self._pages.add(page_no, pages)

    def admit_over(self, ids: GivenIds, kv_len: int) -> int:
        """A new row whose first kv_len tokens are stored in kept pages. They stay kept.

        The row does not store these tokens again; where it goes on within the last page, reserve() copies that.

        ids: int64 [n], page_no 0 first; what keep() returned for any rows, in the order of page_no. Of the SWA space
             only the pages that steps after kv_len tokens see need be kept
        Raises WrongState for ids that are not kept, OutOfRows, NeverFits beyond max_kv_len, and BadBatch for pages that
        are not the first ones of a sequence, that do not hold kv_len tokens, or more than these, or that a window
        lacks; nothing is changed then.
        """
        places = self._pages.places_of(ids)
        end = len(places)
        page_size = self._rows.page_size
        if kv_len < 0 or num_pages(kv_len, page_size) != end:
            raise BadBatch(
                f"{kv_len} tokens lie in {num_pages(max(0, kv_len), page_size)} pages of {page_size}, and "
                f"{end} kept pages are given; give as many as the tokens need"
            )
        self._rows.row_width.require(kv_len, self._max_kv_len)
        strange = self._pages.page_no_at(places) != np.arange(end)
        if strange.any():
            at = int(strange.argmax())
            raise BadBatch(
                f"kept page {at} was page_no {self._pages.page_no_at(places)[at]} of its sequence; a row begins with "
                "page_no 0, and goes on page by page"
            )
        pages = [self._pages.pages_at(places, space) for space in range(len(self._rows.spaces))]
        first = [table.first_held_of(held, kv_len) for table, held in zip(self._rows.spaces, pages, strict=True)]
        row = self._rows.admit()
        self._rows.capacity[row], self._rows.reserved_len[row] = end * self._rows.page_size, kv_len
        for table, begin, held in zip(self._rows.spaces, first, pages, strict=True):
            table.begin_over(row, begin, held)
        self._rows.tokens.begin_over(row, kv_len)
        return row

    def drop(self, ids: GivenIds, spaces: Collection[Space] = EVERY_SPACE) -> None:
        """Keep pages no longer; those that no row holds, and no other keep, are free.

        spaces: in which they are dropped. An id with pages in no space is gone for ever
        Raises WrongState for ids that are not kept in any of these spaces, or named twice; nothing is changed then.
        """
        places = self._pages.places_of(ids)
        pages = [self._pages.pages_at(places, space) for space in range(len(self._rows.spaces))]
        named = [space for space, table in enumerate(self._rows.spaces) if table.space in spaces]
        # An id without any page is where an interrupted call comes again.
        elsewhere = np.any(pages, axis=0) & ~np.any([pages[space] for space in named], axis=0)
        if elsewhere.any():
            raise WrongState(
                f"{np.asarray(ids)[elsewhere][0]} is kept, but not in {' or '.join(s.name for s in spaces)}: it was "
                "dropped there already, or never kept"
            )
        for space in named:
            self._pages.clear(places, space)
            self._rows.spaces[space].let_go(pages[space][pages[space] != RESERVED_PAGE])
        self._pages.forget_empty(places)

    def drop_all(self) -> None:
        """Keep nothing any longer, and give back all pages that no row holds, those too that an interrupt has lost."""
        self._pages.drop_all()
        for table in self._rows.spaces:
            table.count_anew()

    def pages(self, ids: GivenIds, space: Space = Space.FULL) -> Int32Array:
        """int32 [n]: the pages of ids in a space, 0 for those that are not kept there.

        Raises WrongState, BadSetting.
        """
        table = self._rows.space(space)
        return self._pages.pages_at(self._pages.places_of(ids), self._rows.spaces.index(table))

    def num_holders(self, page: int, space: Space = Space.FULL) -> int:
        """Rows that hold a page, and keeps of it: 0 for a free page. Raises BadBatch, BadSetting."""
        table = self._rows.space(space)
        if not RESERVED_PAGE < page < table.pages.num_pages:
            raise BadBatch(
                f"{page} is not a page{table.pages.of}; pages run from {RESERVED_PAGE + 1} to "
                f"{table.pages.num_pages - 1}"
            )
        return int(table.num_holders(np.array([page]))[0])

    def num_holders_of(self, ids: GivenIds, space: Space = Space.FULL) -> Int32Array:
        """int32 [n]: num_holders of the pages of ids in a space, each keep itself included.

        1: only this keep holds the page, so that drop() makes it free; 0: it is not kept there.
        Raises WrongState, BadSetting.
        """
        pages = self.pages(ids, space)
        holders: Int32Array = self._rows.space(space).num_holders(pages)
        return np.where(pages == RESERVED_PAGE, 0, holders).astype(np.int32)
