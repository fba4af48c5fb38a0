"""Global memory as a program may see it: only the storages that its launch was given.

An allocation is memory of this process at its own address, so a cache of several GiB that was never written costs
nothing, and its 64-bit addresses are real.
"""

import ctypes
from dataclasses import dataclass, field

import numpy as np

from rocm_lab.simulator.arrays import Array
from rocm_lab.simulator.faults import SimulationFault


@dataclass(frozen=True, slots=True)
class Allocation:
    """num_bytes bytes of this process from address on; the caller keeps them alive."""

    name: str
    address: int
    num_bytes: int
    is_writable: bool = True
    _items: dict[int, Array] = field(default_factory=dict)

    def items(self, size: int) -> Array:
        """Every run of size bytes, by the offset of its first byte; items overlap."""
        if size not in self._items:
            memory = memoryview((ctypes.c_uint8 * self.num_bytes).from_address(self.address))
            self._items[size] = np.ndarray((self.num_bytes - size + 1,), f"V{size}", memory, strides=(1,))
        return self._items[size]

    def distance(self, address: int) -> int:
        """Bytes between the address and the nearest end of the allocation; not positive inside of it."""
        return max(self.address - address, address - (self.address + self.num_bytes))


class Memory:
    """The allocations of a launch; every access must lie in one of them."""

    def __init__(self, allocations: list[Allocation]) -> None:
        self.allocations = [allocation for allocation in allocations if allocation.num_bytes]

    def load(self, addresses: Array, size: int) -> Array:
        """uint8 [lanes, size] from int64 [lanes] addresses. Raises SimulationFault."""
        allocation, offsets = self._locate(addresses, size, "loads")
        return allocation.items(size)[offsets].view(np.uint8).reshape(-1, size)

    def store(self, addresses: Array, values: Array) -> None:
        """Store uint8 [lanes, size]; of lanes that name one address the last wins. Raises SimulationFault."""
        size = values.shape[1]
        allocation, offsets = self._locate(addresses, size, "stores")
        if not allocation.is_writable:
            raise SimulationFault(f"stores to {allocation.name}, which may only be read")
        allocation.items(size)[offsets] = values.view(f"V{size}")[:, 0]

    def _locate(self, addresses: Array, size: int, verb: str) -> tuple[Allocation, Array]:
        """The allocation that holds every lane's bytes, and the offsets in it."""
        first = int(addresses[0])
        for allocation in self.allocations:
            # Numbers cost less than arrays, and one lane rules out nearly all others.
            if not 0 <= first - allocation.address <= allocation.num_bytes - size:
                continue
            # Below the allocation the difference wraps around to a huge number.
            offsets = (addresses - allocation.address).view(np.uint64)
            if int(offsets.max()) + size <= allocation.num_bytes:
                return allocation, offsets
        raise SimulationFault(self._describe(addresses, size, verb))

    def _describe(self, addresses: Array, size: int, verb: str) -> str:
        for lane, address in enumerate(addresses.tolist()):
            inside = (a.address <= address and address + size <= a.address + a.num_bytes for a in self.allocations)
            if not any(inside):
                nearest = min(self.allocations, key=lambda a: a.distance(address))
                return (
                    f"{verb} {size} bytes at 0x{address:x} (active lane {lane}), outside of every allocation; "
                    f"{address - nearest.address} bytes from the start of {nearest.name}, which has {nearest.num_bytes}"
                )
        return f"{verb} {size} bytes at addresses in several allocations at once"
