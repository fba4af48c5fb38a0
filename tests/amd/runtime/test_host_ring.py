"""HostRing: slots come back after their readers, and so does the memory of a ring that is dropped."""

from __future__ import annotations

import weakref

import torch

from rocm_attn.batch.step_batch import Int32Array
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


MARK, UNREAD = 2, 77


class Waits:
    """Counts what is waited for."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, fence: object) -> None:
        self.number += 1


def published(ring: HostRing) -> Int32Array:
    """The words of the next slot, which no kernel has read."""
    words = ring.acquire(4).words
    words[MARK] = UNREAD
    ring.release()
    return words


def test_a_slot_whose_follower_was_read_is_not_waited_for() -> None:
    waits = Waits()
    ring = HostRing(torch.device("cpu"), depth=2, mark=(MARK, UNREAD), wait=waits)
    first, second = published(ring), published(ring)
    before = waits.number
    first[MARK] = second[MARK] = 0
    assert published(ring) is first
    assert waits.number == before


def test_a_slot_is_waited_for_while_its_own_mark_or_its_followers_says_nothing() -> None:
    """Its own reader may have begun, and other readers of it may not; and what the host reads may come late."""
    for own, following in ((0, UNREAD), (UNREAD, 0), (UNREAD, UNREAD)):
        waits = Waits()
        ring = HostRing(torch.device("cpu"), depth=3, mark=(MARK, UNREAD), wait=waits)
        first, second, third = published(ring), published(ring), published(ring)
        first[MARK], second[MARK], third[MARK] = own, following, 0
        before = waits.number
        published(ring)
        assert waits.number == before + 1


def test_a_ring_without_marks_waits_each_time() -> None:
    waits = Waits()
    ring = HostRing(torch.device("cpu"), depth=2, wait=waits)
    for number in range(1, 6):
        ring.acquire(4)
        ring.release()
        assert waits.number == number
