"""PeerSums: small sums over the ranks of one host, through memory that all of them read, in one launch each.

A step of one token a sequence has two sums for each layer, of a few kilobytes; by a library of collectives each takes
longer than the product before it. Larger sums stay with the library, which sends each value fewer times.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from rocm_attn.kernels.model.peer_sum import PeerMemory

# Ranks -> the most bytes of a sum: each rank reads those of all others. The sizes up to which vLLM's and SGLang's sums
# of one stage are used, and for two ranks, which a ring would send no fewer, all that there is room for.
_MOST_BYTES = {2: 1 << 23, **dict.fromkeys((3, 4), 1 << 19), **dict.fromkeys((5, 6, 7, 8), 1 << 18)}
# Sizes of the trial, in elements: of one program and of many.
_TRIED = (8, 520, 4096, 50008)
_TRIALS = 32
# Looks at the flags of other ranks in a sum of the trial: a tenth of a second. Memory whose flags never come holds up
# the start for as long, and not for ever.
_LOOKS = 1 << 16

Sum = Callable[[Tensor], Tensor]


class SmallSums(Protocol):
    """Sums some tensors over ranks, in place, in the order of ranks and in float32, rounded once."""

    def serves(self, x: Tensor) -> bool: ...
    def add_up(self, x: Tensor) -> None: ...


class NoSmallSums:
    """There is no memory that all ranks read."""

    def serves(self, x: Tensor) -> bool:
        """False."""
        return False

    def add_up(self, x: Tensor) -> None:
        raise AssertionError("it serves nothing")


class PeerSums:
    """Sums through PeerMemory. Two sums of a rank must not run at the same time."""

    def __init__(self, memory: PeerMemory, most_bytes: int) -> None:
        from rocm_attn.kernels.model.peer_sum import UNIT_BYTES, launch_peer_sum

        self._memory, self._most_bytes, self._unit, self._launch = memory, most_bytes, UNIT_BYTES, launch_peer_sum

    def serves(self, x: Tensor) -> bool:
        """True for a sum that is small. Sizes and strides decide, which are the same on all ranks."""
        return x.nbytes <= self._most_bytes and x.nbytes % self._unit == 0 and x.is_contiguous()

    def add_up(self, x: Tensor) -> None:
        """Launches the sum."""
        self._launch(x, self._memory)

    def try_to_add_up(self, x: Tensor) -> None:
        """Does the same, but does not wait for ranks that never come: the result is wrong then."""
        self._launch(x, self._memory, looks=_LOOKS)


def small_sums(group: dist.ProcessGroup, in_order: Sum, least: Callable[[int], int]) -> SmallSums:
    """The small sums of a group, which all of its ranks ask for at the same time.

    They are tried first: their bits must be those of `in_order`, on every rank. Otherwise there are none, and a warning
    says so.
    in_order: sums through the library of collectives; see Ranks.sum_in_order
    least:    the smallest of every rank's number
    """
    if dist.get_backend(group) != "nccl" or group.size() not in _MOST_BYTES:
        return NoSmallSums()
    trial = _Trial(group, in_order, torch.device("cuda", torch.cuda.current_device()))
    if not least(_is_one_host(least)):
        return NoSmallSums()
    for stage in (trial.share, trial.compile, trial.compare):
        try:
            why = stage()
        except Exception as error:  # of any kind: torch's module is not public, and Triton has errors of its own
            why = str(error).partition("\n")[0] or type(error).__name__
        if why:
            logging.getLogger(__name__).warning("sums over ranks go by collectives: memory of the ranks' GPUs: %s", why)
        if not least(not why):  # after each stage, so that no rank goes on alone
            return NoSmallSums()
    return trial.sums


def _is_one_host(least: Callable[[int], int]) -> bool:
    """True if all ranks run on one host, by its name."""
    name = crc32(platform.node().encode())
    first, last = least(name), -least(-name)  # each rank makes both calls
    return first == name == last


class _Trial:
    """The stages of a trial. Each returns why there are no small sums, empty if there may be, or raises."""

    sums: PeerSums

    def __init__(self, group: dist.ProcessGroup, in_order: Sum, device: torch.device) -> None:
        self._group, self._in_order, self._device = group, in_order, device
        random = torch.Generator(device).manual_seed(group.rank())
        self._given = [
            torch.randn(num, generator=random, device=device).to(dtype)
            for _ in range(_TRIALS)
            for num in _TRIED
            for dtype in (torch.bfloat16, torch.float32)
        ]

    def share(self) -> str:
        """Makes memory of each rank that all of them read and write."""
        from torch.distributed import _symmetric_memory as symmetric

        from rocm_attn.kernels.model.peer_sum import PeerMemory, memory_bytes

        group = self._group
        memory = symmetric.empty(memory_bytes(group.size()), dtype=torch.uint8, device=self._device)
        memory.zero_()
        torch.cuda.synchronize(self._device)
        addresses = symmetric.rendezvous(memory, group.group_name).buffer_ptrs
        self.sums = PeerSums(PeerMemory.of(memory, addresses, group.rank()), _MOST_BYTES[group.size()])
        return ""

    def compile(self) -> str:
        """Compiles the kernel by sums that are not judged: one rank may be late."""
        for x in self._given[: len(self._given) // _TRIALS]:
            self.sums.try_to_add_up(x.clone())
        torch.cuda.synchronize(self._device)
        return ""

    def compare(self) -> str:
        """Compares sums of random values, one right after the other, with in_order, bit by bit."""
        found = [x.clone() for x in self._given]
        for x in found:
            self.sums.try_to_add_up(x)
        # Each rank makes all calls, whatever it finds.
        is_same = [torch.equal(self._in_order(x), y) for x, y in zip(self._given, found, strict=True)]
        return "" if all(is_same) else "its sums are not those of the collectives"
