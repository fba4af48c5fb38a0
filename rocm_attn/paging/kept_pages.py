"""KeptPages: full pages that stay when their row is freed, for a prefix cache; later rows may begin with them."""

from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rocm_attn.batch.mask import on_host
from rocm_attn.batch.step_batch import Int32Array, Integers, has_repeats
from rocm_attn.errors import BadBatch, BadSetting, FitsLater, WrongState
from rocm_attn.machine.settings import whole_number
from rocm_attn.paging.index_spaces import RESERVED_PAGE, Space, num_pages
from rocm_attn.paging.page_table import TableGuards
from rocm_attn.paging.rows import Rows, one_each

# int64 [n]: the result of keep(). Functions that take ids also take parts, concatenations, and plain sequences of ints.
KeptIds = npt.NDArray[np.int64]
GivenIds = npt.NDArray[np.integer[Any]] | Sequence[int]

# All spaces that a table may have.
EVERY_SPACE: Final[tuple[Space, ...]] = (Space.FULL, Space.SWA)

# 67 million ids at a time, and 2 ** 37 keeps in each place before an id could repeat.
_GENERATION = 1 << 26


class KeptPages:
    """The kept pages of a request table (RequestTable.kept). Each keep has its own id, which is never used again.

    An id is no page id: it stands for one page_no of a sequence in all spaces, so ids of two spaces cannot be confused.
    It consists of an index in the lists below and that index's generation, so a dropped id is recognised even if its
    index or its pages are in use again.
    """

    def __init__(self, rows: Rows, guards: TableGuards) -> None:
        self._rows, self._is_kept = rows, guards.is_kept
        # For each place: the id that is kept there, or minus the last one that was.
        self._ids = np.empty(0, np.int64)
        self._page_no = np.empty(0, np.int32)
        # [space][place]: the page; page 0 stands for none.
        self._pages = np.empty((len(rows.spaces), 0), np.int32)
        # For each place: the slot of the recurrent layers' states after the page's last token; 0: not kept.
        self._states = np.empty(0, np.int32)
        self._free_places: list[int] = []

    def keep(self, row: int, first_page_no: int, end_page_no: int, spaces: Collection[Space] = EVERY_SPACE) -> KeptIds:
        """Keeps the pages [first_page_no, end_page_no) of row until drop(), even if row is freed.

        Row must not store in them again; to recompute some of their tokens, truncate() it. A page may be kept several
        times, each time under another id.

        With recurrent layers, the state after a page's last token is kept too, if it still exists, a checkpoint is due
        there and one is free: see RecurrentLayers. have_states() says for which pages it was.

        spaces: spaces in which a page is kept; those that the table does not have are ignored
        Returns int64 [n] ids, one for each page_no.
        Raises WrongState, BadSetting, and BadBatch for a page that is not full of stored tokens, or has left a window;
        nothing is changed then. For a length that only the device knows, the bound counts: keep only pages known to be
        stored.
        """
        row = self._rows.must_be_admitted(row)
        first, end = whole_number("first_page_no", first_page_no), whole_number("end_page_no", end_page_no)
        if not 0 <= first <= end:
            raise BadBatch(
                f"the range of pages [{first}, {end}) cannot be kept; it must begin at 0 or "
                "later and end at its beginning or later"
            )
        # One page past the stored ones is enough to be refused.
        stored = int(self._rows.tokens.stored_len[row]) // self._rows.page_size
        page_no = np.arange(first, min(end, max(first, stored) + 1))
        return self.keep_all(np.full(len(page_no), row, np.int32), page_no, spaces)

    def keep_all(self, rows: Integers, page_no: Integers, spaces: Collection[Space] = EVERY_SPACE) -> KeptIds:
        """Does keep(rows[i], page_no[i], page_no[i] + 1) for every i, or for none. A row may occur several times.

        rows, page_no: integers [n]
        """
        rows, page_no = one_each(rows, "page_no", page_no)
        if len(rows) == 0:
            return np.empty(0, np.int64)
        self._rows.must_all_be_admitted(rows)
        self._rows.tokens.on_share()
        stored_len = self._rows.tokens.stored_len[rows]
        wrong = page_no >= stored_len // self._rows.page_size
        if wrong.any():
            at = int(wrong.argmax())
            raise BadBatch(
                f"row {rows[at]} has {stored_len[at]} stored tokens, which fill the pages before page_no "
                f"{stored_len[at] // self._rows.page_size}; page_no {page_no[at]} cannot be kept"
            )
        kv_len = (page_no + 1) * self._rows.page_size
        pages = np.zeros((len(self._rows.spaces), len(rows)), np.int32)
        for space in self._named(spaces):
            table = self._rows.spaces[space]
            is_whole = page_no * self._rows.page_size >= table.first_token[rows]
            pages[space] = table.entries_host[rows, page_no] * is_whole
            if not pages[space].all():
                at = int(pages[space].argmin())
                raise BadBatch(
                    f"page_no {page_no[at]} of row {rows[at]} has left the window of the {table.space.name} space; "
                    "keep it before a step releases it, or in the other space alone"
                )
        self._rows.generations.share(rows)
        self._rows.tokens.raise_first_writable(rows, kv_len)
        for space in self._named(spaces):
            self._rows.spaces[space].hold(pages[space])
        return self._add(page_no, pages, self._rows.states.keep_all(rows, kv_len))

    def admit_over(self, ids: GivenIds, kv_len: int) -> int:
        """Admits a row that begins with kept pages, which hold its first kv_len tokens. They stay kept.

        The row must not store these tokens again; if it continues within the last page, reserve() copies that page.

        ids: int64 [n], page_no 0 first; results of keep() for any rows, in the order of page_no. In the SWA space only
             pages that steps after kv_len tokens see need to be kept
        Raises WrongState for ids that are not kept, OutOfRows, and BadBatch for pages that are not the first ones of a
        sequence, that do not hold kv_len tokens, or more than these, if a page of a window is missing, or if recurrent
        layers have no state after kv_len tokens; nothing is changed then.
        """
        places, kv_len = self._places(ids), whole_number("kv_len", kv_len)
        end, page_size = len(places), self._rows.page_size
        if kv_len < 0 or num_pages(kv_len, page_size) != end:
            raise BadBatch(
                f"{end} kept pages are given and {kv_len} tokens lie in {num_pages(max(0, kv_len), page_size)} "
                f"pages of {page_size}; give as many pages as the tokens need"
            )
        strange = self._page_no[places] != np.arange(end)
        if strange.any():
            at = int(strange.argmax())
            raise BadBatch(
                f"kept page {at} was page_no {self._page_no[places[at]]} of its sequence; give a row's kept pages "
                "in order, beginning with page_no 0"
            )
        state = self._rows.states.checkpoint_at(kv_len, self._states[places])
        row = self._rows.begin(list(self._pages[:, places]), kv_len, kv_len)
        self._rows.states.begin_at(row, state, kv_len)
        return row

    def drop(self, ids: GivenIds, spaces: Collection[Space] = EVERY_SPACE) -> None:
        """Stops keeping pages. They become free if no row and no other keep holds them.

        spaces: spaces in which they are dropped. An id with pages in no space never becomes valid again
        Raises WrongState for ids that are not kept in any of these spaces, or named twice, BadBatch, and BadSetting;
        nothing is changed then.
        """
        places, named = self._places(ids), self._named(spaces)
        pages = self._pages[:, places]
        # An id without any page is left by an interrupted call, which may be repeated.
        elsewhere = pages.any(axis=0) & ~pages[named].any(axis=0)
        if elsewhere.any():
            raise WrongState(
                f"{np.asarray(ids)[elsewhere][0]} is kept, but not in {' or '.join(s.name for s in spaces)}: it "
                "was dropped there, or never kept"
            )
        for space in named:
            self._pages[space, places] = RESERVED_PAGE
            self._rows.spaces[space].let_go(pages[space][pages[space] != RESERVED_PAGE])
        empty = places[~self._pages[:, places].any(axis=0)]
        self._ids[empty] = -np.abs(self._ids[empty])
        self._rows.states.drop(self._states[empty].tolist())
        self._free_places += empty.tolist()

    def drop_all(self) -> None:
        """Drops all keeps, and gives back all pages that no row holds, including those that an interrupt has lost."""
        self._ids = -np.abs(self._ids)
        self._pages[:] = RESERVED_PAGE
        self._rows.states.drop_all()
        self._free_places = list(range(len(self._ids) - 1, -1, -1))
        for table in self._rows.spaces:
            table.count_anew()

    def ids(self) -> KeptIds:
        """int64 [n]: all ids that are kept, so that a caller can check whether it has lost some."""
        return self._ids[self._ids > 0]

    def have_states(self, ids: GivenIds) -> npt.NDArray[np.bool_]:
        """bool [n]: True if a row can be admitted over the pages up to this one: recurrent layers have a state there.

        True for all if there are no recurrent layers. Raises WrongState.
        """
        places = self._places(ids)
        return (self._states[places] > 0) | self._rows.states.is_empty

    def states_due(self, rows: Integers, page_no: Integers) -> npt.NDArray[np.bool_]:
        """bool [n]: True if keep_all() keeps a state with this page, as long as num_free_states is large enough.

        rows, page_no: integers [n]
        Raises WrongState for a row that is not admitted, BadBatch.
        """
        rows, page_no = one_each(rows, "page_no", page_no)
        if len(rows):
            self._rows.must_all_be_admitted(rows)
        return self._rows.states.are_due(rows, (page_no + 1) * self._rows.page_size)

    @property
    def num_free_states(self) -> int:
        """States of recurrent layers that can be kept in addition to those that are."""
        return self._rows.states.num_free

    def drop_states(self, ids: GivenIds) -> None:
        """Gives back the states that are kept with pages; the pages stay kept. Raises WrongState for unknown ids."""
        places = self._places(ids)
        self._rows.states.drop(self._states[places].tolist())
        self._states[places] = 0

    def are_kept(self, pages: Sequence[int], space: Space) -> bool:
        """True if all of these pages of a space are kept; 0 stands for none. Raises BadSetting."""
        kept = self._pages[self._rows.spaces.index(self._rows.space(space))]
        return bool(np.isin(pages, np.append(kept, RESERVED_PAGE)).all())

    def pages(self, ids: GivenIds, space: Space = Space.FULL) -> Int32Array:
        """int32 [n]: the pages of ids in a space, 0 for those that are not kept there.

        Raises WrongState, BadSetting.
        """
        number = self._rows.spaces.index(self._rows.space(space))
        pages: Int32Array = self._pages[number, self._places(ids)]
        return pages

    def num_holders(self, page: int, space: Space = Space.FULL) -> int:
        """Rows that hold a page, and keeps of it: 0 for a free page. Raises BadBatch, BadSetting."""
        table, page = self._rows.space(space), whole_number("page", page)
        if not RESERVED_PAGE < page < table.pages.num_pages:
            raise BadBatch(
                f"{page} is not a page{table.pages.of}; pages run from {RESERVED_PAGE + 1} to "
                f"{table.pages.num_pages - 1}"
            )
        return int(table.num_holders(np.array([page]))[0])

    def num_holders_of(self, ids: GivenIds, space: Space = Space.FULL) -> Int32Array:
        """int32 [n]: num_holders of the pages of ids in a space, each keep itself included.

        1: only this keep holds the page, so drop() makes it free; 0: it is not kept there.
        Raises WrongState, BadSetting.
        """
        pages = self.pages(ids, space)
        holders: Int32Array = self._rows.space(space).num_holders(pages) * (pages != RESERVED_PAGE)
        return holders

    def _named(self, spaces: Collection[Space]) -> list[int]:
        """The indices of the table's spaces that are named. Raises BadSetting for another kind of value."""
        if not isinstance(spaces, Collection) or not all(isinstance(each, Space) for each in spaces):
            raise BadSetting(f"spaces is {spaces!r}; give a list of Spaces")
        return [number for number, table in enumerate(self._rows.spaces) if table.space in spaces]

    def _places(self, given: GivenIds) -> KeptIds:
        """int64 [n]: the places of ids. Raises BadBatch, and WrongState unless all are kept, and each is named once."""
        ids = on_host("ids of kept pages", given)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise BadBatch(
                f"ids of kept pages are {ids.dtype} of shape {list(ids.shape)}; give a vector of integers, results of "
                "keep()"
            )
        ids = ids.astype(np.int64)
        places = ids & (_GENERATION - 1)
        inside = (ids > 0) & (places < len(self._ids))
        kept = inside.copy()
        kept[inside] = self._is_kept(ids[inside], self._ids[places[inside]])
        if not kept.all():
            raise WrongState(
                f"{ids[~kept][0]} is not the id of a kept page: it was dropped already, or keep() never returned it"
            )
        if has_repeats(places):
            raise WrongState("a kept page is named twice; name each id once")
        return places

    def _add(self, page_no: Int32Array, pages: npt.NDArray[np.int32], states: Int32Array) -> KeptIds:
        """Makes ids for pages that are held for them. pages: int32 [num_spaces, n]; states: [n]. Raises FitsLater."""
        num_ids = len(page_no)
        if num_ids > len(self._free_places):
            self._grow(num_ids)
        first = len(self._free_places) - num_ids
        places = np.array(self._free_places[first:], np.int64)
        del self._free_places[first:]
        self._page_no[places] = page_no
        self._pages[:, places], self._states[places] = pages, states
        ids: KeptIds = _GENERATION + np.abs(self._ids[places])
        self._ids[places] = ids
        return ids

    def _grow(self, num_more: int) -> None:
        old = len(self._ids)
        new = max(1024, 2 * old, old + num_more)
        if new > _GENERATION:
            raise FitsLater(f"{old} ids of kept pages are in use, and at most {_GENERATION} can be; drop some")
        ids = np.append(self._ids, -_GENERATION - np.arange(old, new))
        page_no = np.append(self._page_no, np.zeros(new - old, np.int32))
        pages = np.append(self._pages, np.zeros((len(self._pages), new - old), np.int32), axis=1)
        states = np.append(self._states, np.zeros(new - old, np.int32))
        # At once, so that an interrupt leaves all or none.
        self._page_no, self._pages, self._states, self._ids = page_no, pages, states, ids
        self._free_places[:0] = range(new - 1, old - 1, -1)
