"""IdlePages: the cached pages of a space that no row holds, the least recently used first."""

import numpy as np
from numpy.typing import NDArray

_NOT_IDLE = -1
_NONE = np.empty(0, np.int64)


class IdlePages:
    """The pages, by their numbers in CachedPages. A request with a long prompt adds and removes thousands at once.

    Each page that is added gets a turn, and an entry in the queue at that turn. An entry whose page has another turn by
    now, or is not idle, is passed over. So a removal moves nothing.

    most_stale: entries that the queue has room for, next to twice as many as there are pages
    """

    def __init__(self, most_stale: int = 1024) -> None:
        self._most_stale = most_stale
        self._turn = np.full(1, _NOT_IDLE, np.int64)  # of each page
        self._queue = np.empty(0, np.int64)
        self._first, self._end = 0, 0  # turns of the entries: the queue's first one has turn 0
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def in_order(self) -> NDArray[np.int64]:
        """The pages, the least recently used first."""
        return self._between(self._first, self._end)

    def add(self, pages: NDArray[np.int64]) -> None:
        """Adds distinct pages as the last ones, in order. Those that are idle already get a new turn."""
        if len(pages) == 0:
            return
        most = int(pages.max())
        if most >= len(self._turn):
            self._turn = np.concatenate((self._turn, np.full(most + 1, _NOT_IDLE)))
        if self._end + len(pages) > len(self._queue):
            self._make_room(len(pages))
        end = self._end + len(pages)
        self._num += int(np.count_nonzero(self._turn[pages] == _NOT_IDLE))
        self._queue[self._end : end] = pages
        self._turn[pages] = np.arange(self._end, end)
        self._end = end

    def remove(self, pages: NDArray[np.int64]) -> None:
        """Removes distinct pages, if they are idle."""
        inside = pages[pages < len(self._turn)]
        self._num -= int(np.count_nonzero(self._turn[inside] != _NOT_IDLE))
        self._turn[inside] = _NOT_IDLE

    def take(self, num: int) -> NDArray[np.int64]:
        """Removes and returns the pages that were used the least recently: `num` of them, or all."""
        taken, num = [_NONE], min(num, self._num)
        while num > 0:
            end = min(self._end, self._first + num)
            taken.append(self._between(self._first, end))
            self._first = end
            self.remove(taken[-1])
            num -= len(taken[-1])
        return np.concatenate(taken)

    def _between(self, first: int, end: int) -> NDArray[np.int64]:
        """The pages with turns from `first` to before `end`."""
        entries = self._queue[first:end]
        has_turn: NDArray[np.bool_] = self._turn[entries] == np.arange(first, end)
        return entries[has_turn]

    def _make_room(self, num: int) -> None:
        """Leaves out the entries that are passed over, and makes the queue twice as long as it has to be."""
        pages = self.in_order()
        self._queue = np.empty(2 * (len(pages) + num) + self._most_stale, np.int64)
        self._queue[: len(pages)] = pages
        self._turn[pages] = np.arange(len(pages))
        self._first, self._end = 0, len(pages)
