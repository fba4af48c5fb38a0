"""HostPool: one range of host memory that recordings without a GPU share, as a device's recordings share a pool.

A block is free again when nothing refers to its storage, which the storage itself reports. So intermediates of
a recording reuse each other's memory in the order in which they died, and stay in the caches.
"""

from __future__ import annotations

import mmap
import weakref
from bisect import insort
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rocm_attn.hip_graphs.size_ladder import round_up

# The alignment of torch's own CPU allocator; some matrix kernels round differently at other alignments.
ALIGNMENT = 64
CHUNK_BYTES = 64 << 20
POISON_BYTE = 0xFF  # NaN in every float type, -1 in every signed integer type


@dataclass(slots=True, eq=False)
class _Chunk:
    """memory and a uint8 tensor over the whole of it; free, taken: half-open byte ranges, free ones ascending."""

    memory: memoryview
    whole: Tensor
    free: list[tuple[int, int]]
    high_water: int = 0
    taken: list[tuple[int, int]] = field(default_factory=list)
    _as_type: dict[torch.dtype, Tensor] = field(default_factory=dict)

    @classmethod
    @torch.inference_mode(False)  # memory that is made in that mode cannot be written outside of it
    def of(cls, num_bytes: int) -> _Chunk:
        # Mapped memory is aligned, and only touched memory is allocated, so an unused rest costs nothing.
        memory = memoryview(mmap.mmap(-1, num_bytes))
        return cls(memory, torch.frombuffer(memory, dtype=torch.uint8), [(0, num_bytes)])

    def holds(self, address: int) -> bool:
        return 0 <= address - self.whole.data_ptr() < len(self.memory)

    def as_type(self, dtype: torch.dtype) -> Tensor:
        """Returns the whole memory as elements of a type."""
        typed = self._as_type.get(dtype)
        if typed is None:
            typed = self._as_type[dtype] = self.whole.view(dtype)
        return typed


class HostPool:
    """Memory for the tensors that recordings make. It is not thread-safe."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self._returned: deque[tuple[_Chunk, int, int]] = deque()

    def take(self, num_bytes: int) -> Tensor:
        """Returns uint8 [num_bytes], num_bytes > 0; its block is free again when its storage dies."""
        # A block returns whenever the last reference to it goes, even inside this function: hence the deque.
        while self._returned:
            _put_back(*self._returned.popleft())
        size = round_up(num_bytes, ALIGNMENT)
        chunk, place = self._best_fit(size)
        start, stop = chunk.free.pop(place)
        if start + size < stop:
            insort(chunk.free, (start + size, stop))
        chunk.high_water = max(chunk.high_water, start + size)
        chunk.taken.append((start, start + size))
        block = chunk.memory[start : start + num_bytes]
        owner = torch.frombuffer(block, dtype=torch.uint8)
        weakref.finalize(block, self._returned.append, (chunk, start, start + size)).atexit = False
        return owner

    def alias(self, tensor: Tensor) -> Tensor | None:
        """Returns the same elements without holding their block, or None for a tensor that lies outside of the pool."""
        if tensor.numel() == 0:
            return None
        address = tensor.data_ptr()
        for chunk in self._chunks:
            if chunk.holds(address):
                first = (address - chunk.whole.data_ptr()) // tensor.element_size()
                return chunk.as_type(tensor.dtype).as_strided(tensor.size(), tensor.stride(), first)
        return None

    def poison_taken(self) -> None:
        """Overwrites all memory handed out since the last time, even if it is in use now."""
        for chunk in self._chunks:
            for start, stop in chunk.taken:
                chunk.whole[start:stop].fill_(POISON_BYTE)
            chunk.taken.clear()

    @property
    def bytes(self) -> int:
        """Bytes that were ever in use at once, per chunk."""
        return sum(chunk.high_water for chunk in self._chunks)

    def _best_fit(self, size: int) -> tuple[_Chunk, int]:
        fits = [
            (stop - start, number, place)
            for number, chunk in enumerate(self._chunks)
            for place, (start, stop) in enumerate(chunk.free)
            if stop - start >= size
        ]
        if not fits:
            self._chunks.append(_Chunk.of(max(size, CHUNK_BYTES)))
            return self._chunks[-1], 0
        _, number, place = min(fits)
        return self._chunks[number], place


def _put_back(chunk: _Chunk, start: int, stop: int) -> None:
    """Makes [start, stop) free and joins it with free neighbours."""
    kept = []
    for span in chunk.free:
        if span[1] == start:
            start = span[0]
        elif span[0] == stop:
            stop = span[1]
        else:
            kept.append(span)
    insort(kept, (start, stop))
    chunk.free = kept
