"""HostBlocks: offloads blocks of an engine's KV cache to host memory, and checks that they come back unchanged.

The engine decides which block goes to which host slot, and when. The device computes a checksum of each block
(rocm_attn/paging/host_record.py): before it is copied out, and again after it has been copied in. It keeps the
checksums in device memory, so no damage to host memory, or to a copy, can change both. Copies run on their own stream,
after the work that the current stream has queued. Nothing waits for the device.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.machine.devices import on_device
from rocm_attn.machine.sending import sent
from rocm_attn.paging.host_memory import HostRecords
from rocm_attn.paging.host_record import HostGuards, checksums

# The parts of a record begin at multiples of this many bytes, as kernels that copy fast and words of checksums need it.
_ALIGNMENT = 16
# Records that lie on the device at a time. The checksum takes four times as much memory.
_STAGED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Moved:
    """Blocks of one group of layers, and the slots of host memory that they go to or come from; as many of each."""

    group: int
    blocks: Sequence[int]
    slots: Sequence[int]


class Transfer:
    """Copies that were launched. num_bytes: of the blocks"""

    def __init__(self, device: torch.device, slots: list[int], num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._on_gpu = device.type == "cuda"
        self._begun, self._ended = (torch.Event(device, enable_timing=self._on_gpu) for _ in range(2))
        self._slots = slots
        with torch.inference_mode(False):
            self._is_right = torch.ones(len(slots), dtype=torch.bool, pin_memory=self._on_gpu)

    def is_done(self) -> bool:
        """True once the device has made them."""
        return not self._on_gpu or self._ended.query()

    def wait(self) -> None:
        """Waits until the device has made them."""
        if self._on_gpu:
            self._ended.synchronize()

    @property
    def seconds(self) -> float:
        """Time on the device, once they are done; 0 on a CPU."""
        return self._begun.elapsed_time(self._ended) / 1000 if self._on_gpu else 0.0

    @property
    def refused(self) -> list[int]:
        """The slots whose blocks did not arrive as they had left, once the copies are done."""
        return [slot for slot, is_right in zip(self._slots, self._is_right.tolist(), strict=True) if not is_right]

    def begin(self) -> None:
        """Called on the stream of the copies, before the first one."""
        if self._on_gpu:
            self._begun.record()

    def end(self, is_right: Sequence[Tensor]) -> None:
        """Called on the stream of the copies, after the last one. is_right: bool, of some slots, in order"""
        if is_right:
            self._is_right.copy_(torch.cat(list(is_right)), non_blocking=True)
        if self._on_gpu:
            self._ended.record()


class HostBlocks:
    """Host memory for blocks of groups of layers.

    groups:    for each group the caches of its layers as bytes, int8 or uint8 [num_blocks, bytes of a block], blocks at
               any stride; a stage of a pipeline may have no layer of a group
    num_slots: blocks that host memory has room for
    guards:    the safeguard of blocks that come back

    Raises BadTensor for other caches, NeverFits without a slot.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], num_slots: int, guards: HostGuards) -> None:
        caches = [cache for group in groups for cache in group]
        for cache in caches:
            if cache.dim() != 2 or cache.dtype not in (torch.int8, torch.uint8) or cache.stride(1) != 1:
                raise BadTensor(
                    f"a cache is {cache.dtype} of shape {list(cache.shape)} and strides {list(cache.stride())}; give "
                    "the bytes of its blocks, int8 or uint8 [num_blocks, bytes], each block without gaps"
                )
        self._groups = [[cache.view(torch.uint8) for cache in group] for group in groups]
        self._is_unchanged, self._device = guards.is_unchanged, caches[0].device
        on_gpu = self._device.type == "cuda"
        self.record_bytes = max(sum(map(_room, group)) for group in self._groups)
        self._records = HostRecords(num_slots, self.record_bytes, pinned=on_gpu)
        with torch.inference_mode(False), on_device(self._device):
            self._checksums = torch.zeros(num_slots, dtype=torch.int64, device=self._device)
            self._stream = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]

    def send_out(self, moved: Sequence[Moved]) -> Transfer:
        """Launches copies of blocks to host memory. Until they are done the blocks must not be written."""

        def send(group: Sequence[Tensor], blocks: Tensor, slots: Tensor, numbers: Sequence[int]) -> None:
            records = self._gathered(group, blocks)
            self._checksums[slots] = checksums(records.view(torch.int64))
            for record, slot in zip(records, numbers, strict=True):
                self._records.at(slot).copy_(record, non_blocking=True)

        return self._launched(moved, send)

    def bring_back(self, moved: Sequence[Moved]) -> Transfer:
        """Launches copies of host memory to blocks. Until they are done the blocks must not be read.

        Blocks that are refused then hold what has arrived, which no request may read.
        """

        def bring(group: Sequence[Tensor], blocks: Tensor, slots: Tensor, numbers: Sequence[int]) -> Tensor:
            records = torch.empty(len(numbers), self.record_bytes, dtype=torch.uint8, device=self._device)
            for record, slot in zip(records, numbers, strict=True):
                record.copy_(self._records.at(slot), non_blocking=True)
            for cache, place in _places(group):
                cache[blocks] = records[:, place : place + cache.shape[1]]
            arrived = self._gathered(group, blocks).view(torch.int64)
            return self._is_unchanged(checksums(arrived), self._checksums[slots])

        return self._launched(moved, bring)

    def _launched(
        self, moved: Sequence[Moved], move: Callable[[Sequence[Tensor], Tensor, Tensor, Sequence[int]], Tensor | None]
    ) -> Transfer:
        sizes = [sum(cache.shape[1] for cache in self._groups[each.group]) * len(each.slots) for each in moved]
        transfer = Transfer(self._device, [slot for each in moved for slot in each.slots], sum(sizes))
        is_right = []
        with torch.inference_mode(), on_device(self._device), self._beside():
            transfer.begin()
            for each in moved:
                for here in self._in_turn(len(each.slots)):
                    blocks, slots = each.blocks[here], each.slots[here]
                    block, slot = (sent(np.array(numbers, np.int64), self._device) for numbers in (blocks, slots))
                    found = move(self._groups[each.group], block, slot, slots)
                    is_right += [] if found is None else [found]
            transfer.end(is_right)
        return transfer

    def _beside(self) -> AbstractContextManager[object]:
        """Makes the stream of copies the current one, after all that this one has to do."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def _in_turn(self, count: int) -> Iterator[slice]:
        """Yields the parts of a list that lie on the device at a time."""
        most = max(1, _STAGED_BYTES // self.record_bytes)
        for first in range(0, count, most):
            yield slice(first, first + most)

    def _gathered(self, group: Sequence[Tensor], blocks: Tensor) -> Tensor:
        """The blocks of a group's layers as records: uint8 [n, record_bytes]. Gaps between parts are 0."""
        records = torch.zeros(len(blocks), self.record_bytes, dtype=torch.uint8, device=self._device)
        for cache, place in _places(group):
            records[:, place : place + cache.shape[1]] = cache[blocks]
        return records


def _places(group: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """Yields each cache of a group, and the place of its part in a record."""
    place = 0
    for cache in group:
        yield cache, place
        place += _room(cache)


def _room(cache: Tensor) -> int:
    """Bytes of a record that a block of a cache takes."""
    return -(-cache.shape[1] // _ALIGNMENT) * _ALIGNMENT
