"""HostRing: slots come back after their readers, and so does the memory of a ring that is dropped."""

from __future__ import annotations

import weakref

import torch

from rocm_attn.step.host_ring import HostRing


def test_a_dropped_ring_waits_for_its_readers_before_its_memory_goes() -> None:
    """torch hands pinned memory on as soon as it has no owner, whatever still reads it."""
    slots: list[weakref.ref[torch.Tensor]] = []
    alive_at_wait = []

    class Fence:
        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            if slots:
                alive_at_wait.append(slots[0]() is not None)

        def query(self) -> bool:
            return True

    ring = HostRing(torch.device("cpu"), depth=2, new_fence=Fence)
    slots.append(weakref.ref(ring.acquire(4)[0]))
    ring.release()
    assert not alive_at_wait
    del ring
    assert alive_at_wait == [True, True]
    assert slots[0]() is None
