"""HostRing: pinned host memory from which kernels read what the host decided for a step."""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_attn.step_batch import Int32Array


class HostRing:
    """A ring of int32 slots. A slot is handed out again only after the kernels that read it are done.

    On a CPU kernels run before their launch returns, so one slot is enough.
    """

    def __init__(self, device: torch.device, *, depth: int = 2) -> None:
        self._on_gpu = device.type == "cuda"
        self._depth = depth if self._on_gpu else 1
        self._slots = [torch.empty(0, dtype=torch.int32)] * self._depth
        self._arrays: list[Int32Array] = [slot.numpy() for slot in self._slots]
        self._done = [torch.Event(device) for _ in range(self._depth)] if self._on_gpu else []
        self._next = 0

    def acquire(self, words: int) -> tuple[Tensor, Int32Array]:
        """The next slot, as a tensor for kernels and an array for the host, both at least `words` int32 long.

        Waits when the device is `depth` steps behind.
        """
        at = self._next
        if self._on_gpu:
            # An event that was never recorded is done.
            self._done[at].synchronize()
        if len(self._arrays[at]) < words:
            # A power of two: batches that grow slowly would otherwise pin memory again each time.
            slot = torch.empty(1 << (words - 1).bit_length(), dtype=torch.int32, pin_memory=self._on_gpu)
            self._slots[at], self._arrays[at] = slot, slot.numpy()
        return self._slots[at], self._arrays[at]

    def release(self) -> None:
        """Say that everything that reads the acquired slot was launched on the current stream."""
        if self._on_gpu:
            self._done[self._next].record()
        self._next = (self._next + 1) % self._depth
