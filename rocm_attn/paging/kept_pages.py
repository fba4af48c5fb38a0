"""KeptPages: pages that stay when their row is freed, each under an id that no other keep of the table ever has.

An id is no page: it stands for a page_no of a sequence in every space, so that ids of two spaces cannot be mixed up.
It is the place where this list has it, and the place's generation. An id that was dropped is thus known as such,
whatever has come to its place or into its pages since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rocm_attn.batch.step_batch import Int32Array
from rocm_attn.errors import FitsLater, WrongState

# int64 [n]: what keep() returns. Slices of them, and concatenations, are KeptIds too.
KeptIds = npt.NDArray[np.int64]

# What takes KeptIds takes plain sequences of ints, too.
GivenIds = npt.NDArray[np.integer[Any]] | Sequence[int]

# ids that were given, ids that lie in their places -> whether they are still kept
IsKept = Callable[[KeptIds, KeptIds], npt.NDArray[np.bool_]]

# 67 million ids at a time, and 2 ** 37 keeps in each place before an id could come again.
_PLACE_BITS = 26
_GENERATION = 1 << _PLACE_BITS


def the_same_id(given: KeptIds, there: KeptIds) -> npt.NDArray[np.bool_]:
    """Whether ids that were given are those that lie in their places."""
    same: npt.NDArray[np.bool_] = given == there
    return same


class KeptPages:
    """The pages that are kept, in every space. It counts no holders: the page tables do.

    num_spaces: of the request table
    is_kept:    which ids are taken for kept
    """

    def __init__(self, num_spaces: int, is_kept: IsKept) -> None:
        self._is_kept = is_kept
        # Of each place: the id that is kept there, or minus the last one that was.
        self._ids = np.empty(0, np.int64)
        self._page_no = np.empty(0, np.int32)
        # Page 0 stands for none.
        self._pages = np.empty((num_spaces, 0), np.int32)
        self._free_places: list[int] = []

    def add(self, page_no: Int32Array, pages: npt.NDArray[np.int32]) -> KeptIds:
        """Ids for pages that are kept from now on.

        page_no: int32 [n]
        pages:   int32 [num_spaces, n]; 0 where the page is not kept in a space
        Raises FitsLater.
        """
        num_ids = len(page_no)
        if num_ids > len(self._free_places):
            self._grow(num_ids)
        first = len(self._free_places) - num_ids
        places = np.array(self._free_places[first:], np.int64)
        del self._free_places[first:]
        self._page_no[places] = page_no
        self._pages[:, places] = pages
        ids: KeptIds = _GENERATION + np.abs(self._ids[places])
        self._ids[places] = ids
        return ids

    def ids(self) -> KeptIds:
        """int64 [n]: all ids that are kept."""
        kept: KeptIds = self._ids[self._ids > 0]
        return kept

    def places_of(self, given: GivenIds) -> KeptIds:
        """int64 [n]: the places of ids. Raises WrongState unless all are kept, and each is named once."""
        ids = np.asarray(given, np.int64)
        places = ids & (_GENERATION - 1)
        inside = (ids > 0) & (places < len(self._ids))
        kept = inside.copy()
        kept[inside] = self._is_kept(ids[inside], self._ids[places[inside]])
        if not kept.all():
            raise WrongState(
                f"{ids[~kept][0]} is not the id of a page that is kept: it was dropped already, or keep() never gave it"
            )
        if len(np.unique(places)) < len(places):
            raise WrongState("a kept page is named twice; name each id once")
        return places

    def page_no_at(self, places: KeptIds) -> Int32Array:
        """int32 [n]: the page of its sequence that each is."""
        page_no: Int32Array = self._page_no[places]
        return page_no

    def pages_at(self, places: KeptIds, space: int) -> Int32Array:
        """int32 [n]: pages in a space, given by its number; 0 where none is kept there."""
        pages: Int32Array = self._pages[space, places]
        return pages

    def of_space(self, space: int) -> Int32Array:
        """int32 [n]: the pages that are kept in a space, given by its number, and 0."""
        pages: Int32Array = self._pages[space]
        return pages

    def clear(self, places: KeptIds, space: int) -> None:
        """Nothing is kept at these places in a space any more."""
        self._pages[space, places] = 0

    def forget_empty(self, places: KeptIds) -> None:
        """Those of these ids that keep nothing in any space are dropped."""
        empty = places[~self._pages[:, places].any(axis=0)]
        self._ids[empty] = -np.abs(self._ids[empty])
        self._free_places += empty.tolist()

    def drop_all(self) -> None:
        """All ids are dropped, whatever an interrupted call has left undone."""
        self._ids = -np.abs(self._ids)
        self._pages[:] = 0
        self._free_places = list(range(len(self._ids) - 1, -1, -1))

    def _grow(self, num_more: int) -> None:
        old = len(self._ids)
        new = max(1024, 2 * old, old + num_more)
        if new > _GENERATION:
            raise FitsLater(f"{old} ids of kept pages are in use, at most {_GENERATION} can be; drop some")
        ids = np.arange(new, dtype=np.int64)
        np.negative(ids, out=ids)
        ids -= _GENERATION
        ids[:old] = self._ids
        page_no = np.zeros(new, np.int32)
        page_no[:old] = self._page_no[:old]
        pages = np.zeros((len(self._pages), new), np.int32)
        pages[:, :old] = self._pages[:, :old]
        self._page_no, self._pages, self._ids = page_no, pages, ids
        self._free_places[:0] = range(new - 1, old - 1, -1)
