"""HostRing: slots come back after their readers, and so does the memory of a ring that is dropped."""

import weakref
from functools import partial

import pytest
import torch

from rocm_attn.kernels.metadata.slot_layout import ECHO, TAKEN_BY_GRAPH
from rocm_attn.step.host_ring import HostRing
from tests.amd.runtime.interrupts import interrupted_at


def test_a_dropped_ring_waits_for_its_readers_before_its_memory_goes() -> None:
    """torch reuses pinned memory as soon as it has no owner, even if it is still being read."""
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
    slots.append(weakref.ref(ring.acquire(4).tensor))
    ring.release()
    assert not alive_at_wait
    del ring
    assert alive_at_wait == [True, True]
    assert slots[0]() is None


def test_words_that_are_sent_arrive_in_turn() -> None:
    ring, here = HostRing(torch.device("cpu"), depth=2), torch.zeros(2, 3, dtype=torch.int32)
    for words in ([1, 2, 3, 4, 5, 6], torch.arange(6).view(2, 3), [6, 5, 4, 3, 2, 1]):
        ring.send(words, here)
        assert here.flatten().tolist() == torch.as_tensor(words).flatten().tolist()


class _GraphRuns:
    """A fence that is reached when it was looked at three times; the graph takes the slot at the second, or never."""

    def __init__(self, ring: list[HostRing], takes: bool) -> None:
        self._ring, self._takes = ring, takes
        self.looks = 0

    def record(self) -> None:
        self.looks = 0

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        self.looks += 1
        if self._takes and self.looks == 2:
            self._ring[0].slots[0, ECHO] = 0
        return self.looks == 3


@pytest.mark.parametrize(("takes", "looks"), [(True, 2), (False, 3)])
def test_a_slot_for_a_graph_is_waited_for_until_it_is_taken_or_nothing_is_left_to_run(takes: bool, looks: int) -> None:
    rings: list[HostRing] = []
    fences: list[_GraphRuns] = []

    def new_fence() -> _GraphRuns:
        fences.append(_GraphRuns(rings, takes))
        return fences[-1]

    rings.append(HostRing(torch.device("cpu"), depth=1, new_fence=new_fence))
    words = rings[0].acquire(8).words
    words[ECHO] = TAKEN_BY_GRAPH
    rings[0].release_to_graph()
    made = len(fences)
    words = rings[0].acquire(8).words
    assert [fence.looks for fence in fences[made:]] == [looks]
    assert words[ECHO] == (0 if takes else TAKEN_BY_GRAPH)
    words[ECHO] = 0  # or it would be waited for when the ring is dropped


def test_a_slot_that_is_too_short_is_no_graphs_any_more() -> None:
    ring = HostRing(torch.device("cpu"), words=16)
    assert len(ring.acquire(16).words) == ring.slots.shape[1] == 16
    assert ring.is_fixed
    assert len(ring.acquire(17).words) == 32
    assert not ring.is_fixed


def test_a_slot_that_is_interrupted_while_it_grows_is_no_graphs_unless_it_is_the_old_one() -> None:
    number = 1
    while True:
        ring = HostRing(torch.device("cpu"), words=16)
        if not interrupted_at(number, partial(ring.acquire, 17)):
            break
        assert not ring.is_fixed or ring.acquire(16).tensor.data_ptr() == ring.slots.data_ptr()
        number += 1
    assert number > 5
