"""PinnedTensors: the memory that recordings read, by name, and a check that it has not moved.

"Pinned" refers to addresses: a pinned tensor must not move while a recording reads it. This is not about locked host
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.hip_graphs.errors import KeyTaken, StaleRecording


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything about a tensor that a recording has frozen, except its values."""

    data_ptr: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Fingerprint:
        return cls(tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)} stride {list(self.stride)} at {self.data_ptr:#x} on {self.device}"


class PinnedTensors:
    """The tensors that recordings read, by name.

    epoch: compared with the recording's own on every replay, which costs one integer comparison. The owner of the
    tensors bumps it when anything moves; check() is the slow, sure comparison, for sealing and for debugging.
    """

    __slots__ = ("_owners", "_pins", "epoch")

    def __init__(self) -> None:
        self.epoch = 0
        self._pins: dict[str, Fingerprint] = {}
        # Each gives all tensors of an owner by name.
        self._owners: list[Callable[[], Mapping[str, Tensor]]] = []

    def pin_all(self, current: Callable[[], Mapping[str, Tensor]]) -> None:
        """Pins every tensor of an owner: none may move from now on. Pinning the same memory twice is harmless.

        current: returns all of the owner's tensors, by name, now and at a later time
        Raises KeyTaken if a name is pinned elsewhere.
        """
        pins = {name: Fingerprint.of(tensor) for name, tensor in current().items()}
        for name, now in pins.items():
            held = self._pins.get(name, now)
            if held != now:
                raise KeyTaken(f"{name} is pinned as {held} and cannot also be {now}; release() the old pins first")
        self._pins.update(pins)
        self._owners.append(current)

    def check(self) -> None:
        """Compares every fingerprint. Raises StaleRecording naming the first tensor that moved, or that is gone."""
        current = {name: tensor for owner in self._owners for name, tensor in owner().items()}
        for name, was in self._pins.items():
            now = Fingerprint.of(current[name]) if name in current else "gone"
            if now != was:
                raise StaleRecording(
                    f"{name} was {was} when it was pinned and is {now} now; the recording reads the old memory: "
                    "drop the recordings, release() the pins and record again"
                )

    def bump(self) -> int:
        """Something has moved: every recording made so far is stale. Returns the new epoch."""
        self.epoch += 1
        return self.epoch

    def release(self) -> None:
        """Forgets every pin, so that the tensors may move, and makes every recording stale."""
        self._pins.clear()
        self._owners.clear()
        self.bump()
