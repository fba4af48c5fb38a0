"""Host memory for offloaded pages, in records of equal size: HostRecords by number, HostMemory by key (LRU)."""

from collections import OrderedDict

import torch
from torch import Tensor

from rocm_attn.errors import BadSetting, NeverFits
from rocm_attn.machine.devices import memory_of
from rocm_attn.machine.settings import require_kind, whole_number

# torch rounds pinned allocations up to a power of two.
_BLOCK_BYTES = 256 << 20


class HostRecords:
    """Host memory in records of equal size.

    num_slots: at least 1
    pinned:    memory that a GPU copies from and to by itself

    Raises NeverFits without a record, and for more than the machine's memory.
    """

    def __init__(self, num_slots: int, record_bytes: int, *, pinned: bool) -> None:
        if num_slots < 1:
            raise NeverFits(f"host memory has room for no record of {record_bytes} bytes; give at least as many bytes")
        num_bytes, has = num_slots * record_bytes, memory_of(torch.device("cpu"))
        if num_bytes > has:
            raise NeverFits(f"{num_bytes} bytes of host memory are wanted, and the machine has {has}; ask for fewer")
        self._of_block = max(1, min(num_slots, _BLOCK_BYTES // record_bytes))
        counts = [self._of_block] * (num_slots // self._of_block)
        if rest := num_slots % self._of_block:
            counts.append(rest)
        try:
            with torch.inference_mode(False):
                self._blocks = [
                    torch.empty(count, record_bytes, dtype=torch.uint8, pin_memory=pinned) for count in counts
                ]
        except RuntimeError as error:
            raise NeverFits(f"the machine does not give {num_bytes} bytes of host memory; ask for fewer") from error

    def at(self, slot: int) -> Tensor:
        """The bytes of a record: uint8 [record_bytes]."""
        block, line = divmod(slot, self._of_block)
        return self._blocks[block][line]


class HostMemory:
    """Host memory for offloaded pages, found by key. The least recently used record is evicted first.

    Runtimes of one process may share it if their records have the same size and their launches go to one stream.

    num_bytes:    most bytes of all records together
    record_bytes: HostPages.record_bytes(runtime)
    pinned:       memory that a GPU copies from and to by itself

    Raises NeverFits if not even one record fits, or the machine has less memory; BadSetting for a part of a byte, and
    for records without bytes.
    """

    def __init__(self, num_bytes: int, record_bytes: int, *, pinned: bool) -> None:
        self.record_bytes = record_bytes = whole_number("record_bytes", record_bytes, least=1)
        require_kind("pinned", pinned, bool, BadSetting)
        self.num_slots = whole_number("num_bytes", num_bytes) // record_bytes
        self._records = HostRecords(self.num_slots, record_bytes, pinned=pinned)
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        """True if there is a record of this key, of whatever runtime."""
        return key in self._slots

    @property
    def num_bytes(self) -> int:
        """Bytes of the records that can be found."""
        return len(self._slots) * self.record_bytes

    def use(self, key: bytes) -> None:
        """Marks the record of a key as the most recently used."""
        self._slots.move_to_end(key)

    def at(self, key: bytes) -> Tensor:
        """The bytes of the record of a key: uint8 [record_bytes]."""
        return self._records.at(self._slots[key])

    def take(self, key: bytes) -> Tensor:
        """Returns memory for a key's record: its older record's, free memory, or that of the least recently used."""
        self.forget(key)
        if not self._free and len(self) < self.num_slots:  # so are they at first, and after clear() or an interrupt
            self._free = sorted(set(range(self.num_slots)).difference(self._slots.values()), reverse=True)
        if not self._free:
            self.forget(next(iter(self._slots)))
        self._slots[key] = self._free.pop()
        return self.at(key)

    def forget(self, key: bytes) -> None:
        """Frees the record of a key, if there is one."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        self._slots.clear()
