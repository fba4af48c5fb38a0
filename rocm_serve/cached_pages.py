"""CachedPages: the entries of a prefix cache, in arrays indexed by an entry's number.

A cache has as many pages as the pool. If each were an object, Python's garbage collection would visit all of them, and
250,000 pages would stop a process for a quarter of a second.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

# Stands for a page that is not there.
NO_PAGE = -1
# Rows that hold a page which the cache does not keep in a space.
NOT_KEPT = -1


class CachedPages:
    """The columns. A page's number is its own until no row names it and free_unused() has seen it.

    capacity:   pages of the pool. A row or the cache holds the page that a number stands for, so there are no more
    num_spaces: of the table

    key:        of a page
    before:     the page before it, or NO_PAGE
    kept_id:    returned by KeptPages.keep(), int64
    step:       the step that entered it, int64
    num_rows:   [space, page]: rows that hold it there, or NOT_KEPT; int32
    num_named:  rows that name it, whether or not it is still kept; int32
    """

    def __init__(self, capacity: int, num_spaces: int) -> None:
        self.key = [b""] * capacity
        self.before, self._first_after = [NO_PAGE] * capacity, [NO_PAGE] * capacity
        # The other pages after the same one, in a ring without a beginning.
        self._next, self._last = [NO_PAGE] * capacity, [NO_PAGE] * capacity
        self.kept_id, self.step = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
        self.num_rows: NDArray[np.int32] = np.full((num_spaces, capacity), NOT_KEPT, np.int32)
        self.num_named = np.zeros(capacity, np.int32)
        self._free = list(range(capacity - 1, -1, -1))

    def make(self, key: bytes, before: int) -> int:
        """Returns the number of a new page, which one row names and the cache does not keep yet."""
        page = self._free.pop()
        self.key[page], self.before[page] = key, before
        self.num_named[page] = 1
        return page

    def after(self, page: int) -> Iterator[int]:
        """The pages that were linked to come after a page."""
        first = other = self._first_after[page]
        while other != NO_PAGE:
            yield other
            other = self._next[other]
            if other == first:
                return

    def link(self, page: int) -> None:
        """Lets a page be found among those after the page before it, if there is one."""
        before = self.before[page]
        if before == NO_PAGE:
            return
        first = self._first_after[before]
        if first == NO_PAGE:
            self._first_after[before] = self._next[page] = self._last[page] = page
            return
        last = self._last[first]
        self._next[page], self._last[page] = first, last
        self._next[last] = self._last[first] = page

    def unlink(self, page: int) -> None:
        """Takes a page from among those after the page before it, which it has no longer."""
        before, self.before[page] = self.before[page], NO_PAGE
        following, last = self._next[page], self._last[page]
        if following == NO_PAGE:  # it is not among any
            return
        self._next[last], self._last[following] = following, last
        self._first_after[before] = NO_PAGE if following == page else following
        self._next[page] = self._last[page] = NO_PAGE

    def move_after(self, old: int, new: int) -> None:
        """Lets the pages after one come after another one, which has none."""
        self._first_after[new], self._first_after[old] = self._first_after[old], NO_PAGE
        for page in self.after(new):
            self.before[page] = new

    def free_unused(self, pages: Iterable[int]) -> None:
        """Makes the numbers of pages that are not kept, and that no row names, available for others."""
        for page in pages:
            if self.num_named[page] == 0:
                self._free.append(page)
