"""Generations: when each row of the request table changed last, so that an earlier step can tell."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rocm_attn.batch.step_batch import Int32Array


class Generations:
    """The changes that make a row another one: admit, free, truncate, fork, keep, admit_over.

    A row's generation is the number of its last change, counted over the whole table. A step therefore remembers one
    number, and pays nothing for it.

    last_change: the number of the table's last change
    """

    __slots__ = ("_of_row", "last_change")

    def __init__(self, num_rows: int) -> None:
        self._of_row: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.last_change = 0

    def change(self, rows: Int32Array | int) -> None:
        """Rows are others from now on."""
        self.last_change += 1
        self._of_row[rows] = self.last_change

    def of(self, row: int) -> int:
        """The number of a row's last change."""
        return int(self._of_row[row])

    def changed_since(self, change: int, rows: Int32Array) -> list[int]:
        """The rows that have changed after a change of the table. rows: int32 [n]"""
        if change == self.last_change:
            return []
        found: list[int] = rows[self._of_row[rows] > change].tolist()
        return found
