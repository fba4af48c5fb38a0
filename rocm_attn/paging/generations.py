"""Generations: when each row of the request table changed last, so that an earlier step can tell."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rocm_attn.batch.step_batch import Int32Array


class Generations:
    """The changes that make a row another one: admit, free, truncate and admit_over; and fork and keep, which share it.

    A row's generation is the number of its last change, counted over the whole table. A step therefore remembers one
    number, and pays nothing for it.

    last_change: the number of the table's last change
    """

    __slots__ = ("_of_row", "_of_share", "last_change")

    def __init__(self, num_rows: int) -> None:
        self._of_row: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self._of_share: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.last_change = 0

    def change(self, rows: Int32Array | int) -> None:
        """Rows are others from now on."""
        self.last_change += 1
        self._of_row[rows] = self.last_change

    def share(self, rows: Int32Array | int) -> None:
        """Pages of rows have other holders from now on, too."""
        self.last_change += 1
        self._of_share[rows] = self.last_change

    def of(self, row: int) -> int:
        """The number of a row's last change."""
        return int(self._of_row[row])

    def changed_since(self, change: int, rows: Int32Array) -> npt.NDArray[np.bool_]:
        """The rows that are others after a change of the table. rows: int32 [n]"""
        changed: npt.NDArray[np.bool_] = self._of_row[rows] > change
        return changed

    def shared_since(self, change: int, rows: Int32Array) -> npt.NDArray[np.bool_]:
        """The rows of which pages were shared after a change of the table. rows: int32 [n]"""
        shared: npt.NDArray[np.bool_] = self._of_share[rows] > change
        return shared
