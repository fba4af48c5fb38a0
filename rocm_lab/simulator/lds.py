"""The LDS of one program: bounds, bytes that were never written, and races between waves.

Between two barriers waves run in any order on hardware. A byte that one wave writes and another one reads or writes in
the same interval is a race, in any order of the simulator; two waves that write the same value are none, nor are two
that add to it.
"""

import numpy as np

from rocm_lab.simulator.arrays import Array
from rocm_lab.simulator.faults import NeverWritten, SimulationFault


class Lds:
    """num_bytes of LDS, filled with a poison word; waves are numbered from 0, at most 16."""

    def __init__(self, num_bytes: int, poison: int) -> None:
        self.num_bytes = num_bytes
        words = -(-max(num_bytes, 4) // 4) + 4
        self._bytes = np.full(words, poison, np.uint32).view(np.uint8)
        self._written = np.zeros(words * 4, np.uint8)
        self._readers = np.zeros(words * 4, np.uint16)
        self._writers = np.zeros(words * 4, np.uint16)
        self._adders = np.zeros(words * 4, np.uint16)

    def barrier(self) -> None:
        """All waves have met: what came before is ordered against what follows."""
        self._readers.fill(0)
        self._writers.fill(0)
        self._adders.fill(0)

    def load(self, offsets: Array, size: int, wave: int) -> Array:
        """uint8 [lanes, size] from int64 [lanes] byte offsets. Raises SimulationFault."""
        self._check_read(offsets, size)
        self._note_load(offsets, size, wave)
        return _items(self._bytes, size)[offsets].view(np.uint8).reshape(-1, size)

    def store(self, offsets: Array, values: Array, wave: int) -> None:
        """Store uint8 [lanes, size]. Raises SimulationFault."""
        size = values.shape[1]
        self._check_bounds(offsets, size, "writes")
        self._note_store(offsets, values, wave)
        _items(self._bytes, size)[offsets] = values.view(f"V{size}")[:, 0]
        _items(self._written, size)[offsets] = np.void(b"\1" * size)

    def add(self, offsets: Array, values: Array, wave: int) -> None:
        """Adds uint32 [lanes] to words, lane after lane. Raises SimulationFault."""
        self._check_read(offsets, 4)
        self._note_add(offsets, values, wave)
        words = _items(self._bytes, 4)
        for offset, value in zip(offsets.tolist(), values, strict=True):
            words[offset] = (words[offset : offset + 1].view(np.uint32) + value).view("V4")[0]

    def _note_add(self, offsets: Array, values: Array, wave: int) -> None:
        """Notes an addition within bounds. Raises SimulationFault if it races."""
        self._check_others(self._readers | self._writers, offsets, 4, wave, "adds to", "reads or writes")
        self._mark(self._adders, offsets, 4, np.uint16(1 << wave))

    def _note_load(self, offsets: Array, size: int, wave: int) -> None:
        """Notes a load within bounds. Raises SimulationFault if it races."""
        self._check_others(self._writers | self._adders, offsets, size, wave, "reads", "writes")
        self._mark(self._readers, offsets, size, np.uint16(1 << wave))

    def _note_store(self, offsets: Array, values: Array, wave: int) -> None:
        """Notes a store within bounds, before it is done. Raises SimulationFault if it races."""
        size = values.shape[1]
        mine = np.uint16(1 << wave)
        self._check_others(self._readers | self._adders, offsets, size, wave, "writes", "reads")
        changes = _items(self._bytes, size)[offsets].view(np.uint8).reshape(-1, size) != values
        others_wrote = (_items(self._writers, size)[offsets].view(np.uint16) & ~mine).reshape(-1, size) != 0
        if (changes & others_wrote).any():
            raise SimulationFault(f"wave {wave} overwrites what another wave writes without a barrier between them")
        self._mark(self._writers, offsets, size, mine)

    def _check_others(self, marks: Array, offsets: Array, size: int, wave: int, verb: str, theirs: str) -> None:
        """Raises SimulationFault if another wave has marked these bytes since the last barrier."""
        mine = np.uint16(1 << wave)
        if (_items(marks, size)[offsets].view(np.uint16) & ~mine).any():
            raise SimulationFault(
                f"wave {wave} {verb} LDS that another wave {theirs} without a barrier between them, "
                f"{self._where((marks & ~mine) != 0, offsets, size)}"
            )

    def _check_read(self, offsets: Array, size: int) -> None:
        self._check_bounds(offsets, size, "reads")
        if not _items(self._written, size)[offsets].view(np.uint8).all():
            raise NeverWritten(f"reads LDS that was never written, {self._where(self._written == 0, offsets, size)}")

    def _check_bounds(self, offsets: Array, size: int, verb: str) -> None:
        if int(offsets.max()) + size > self.num_bytes or int(offsets.min()) < 0:
            raise SimulationFault(f"{verb} LDS at {int(offsets.max())}; the program has {self.num_bytes} bytes")

    @staticmethod
    def _mark(marks: Array, offsets: Array, size: int, mine: np.uint16) -> None:
        items = _items(marks, size)
        marked = items[offsets].view(np.uint16) | mine
        items[offsets] = marked.view(f"V{2 * size}")

    @staticmethod
    def _where(bad: Array, offsets: Array, size: int) -> str:
        (first, *_) = (offset for offset in offsets.tolist() if bad[offset : offset + size].any())
        return f"byte offset {first}"


def _items(values: Array, size: int) -> Array:
    """Every run of size entries, by the index of its first; items overlap."""
    item = values.itemsize
    return np.ndarray((len(values) - size + 1,), f"V{size * item}", values.data, strides=(item,))
