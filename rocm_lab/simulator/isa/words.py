"""Between bytes of memory by active lane and vector registers by lane."""

import numpy as np

from rocm_lab.simulator.arrays import I32, U32, Array
from rocm_lab.simulator.core import Core


class WordSink:
    """Writes values of size bytes to the registers from index on.

    is_signed:  whether a value below 4 bytes is sign-extended; otherwise zero-extended
    half:       which half write_half writes
    """

    def __init__(self, core: Core, index: int, size: int, *, is_signed: bool = False, half: int = 0) -> None:
        self._core = core
        self._rows = core.vector[index : index + max(1, size // 4)]
        self._half = core.vector[index].view(np.uint16)[half::2]
        self._narrow = np.dtype(f"{'int' if is_signed else 'uint'}{8 * size}") if size < 4 else None

    def write(self, values: Array) -> None:
        """values uint8 [active lanes, size]."""
        values = np.ascontiguousarray(values)
        words = values.view(U32) if self._narrow is None else values.view(self._narrow).astype(I32).view(U32)
        if self._core.all_active:
            self._rows[:] = words.T
        else:
            self._rows[:, self._core.active] = words.T

    def write_half(self, values: Array) -> None:
        """values uint8 [active lanes, 2]; the other half stays."""
        self._half[self._core.active] = np.ascontiguousarray(values).view(np.uint16)[:, 0]


class WordSource:
    """Reads values of size bytes from the registers from index on; upper_half: from bit 16 of a register."""

    def __init__(self, core: Core, index: int, size: int, *, upper_half: bool = False) -> None:
        self._core = core
        self._size = size
        self._first = 2 if upper_half else 0
        self._rows = core.vector[index : index + max(1, size // 4)]

    def read(self) -> Array:
        """uint8 [active lanes, size], contiguous."""
        rows = self._rows if self._core.all_active else self._rows[:, self._core.active]
        values = np.ascontiguousarray(rows.T).view(np.uint8)
        return np.ascontiguousarray(values[:, self._first : self._first + self._size])
