"""Pairs of accesses to the same bytes that may conflict, among the many accesses of a launch.

All accesses to a place are looked at in the order in which they happened. Each is compared with the last store before
it, and each load with the next store after it. If these pairs are in order, so are all others, since order is
transitive: see C. Flanagan and S. Freund, "FastTrack: Efficient and Precise Dynamic Race Detection", 2009.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rocm_lab.races.clocks import Operation
from rocm_lab.simulator.arrays import Array


class Touch(NamedTuple):
    """The bytes that an operation loads or stores.

    where:  int64 [lanes] address of each lane's first byte
    size:   bytes of a lane
    values: uint8 [lanes, size] what is stored; of a load [0, size]
    """

    operation: Operation
    where: Array
    size: int
    values: Array

    @property
    def is_store(self) -> bool:
        """False for a load."""
        return len(self.values) > 0


class Pair(NamedTuple):
    """Two touches of the byte at an address, in the order in which they happened; one of them is a store."""

    first: Touch
    second: Touch
    address: int


def pairs_of(touches: Sequence[Touch]) -> Iterator[Pair]:
    """The pairs to be compared, each pair of operations once; not two stores of the same value."""
    stores = [number for number, touch in enumerate(touches) if touch.is_store]
    if not stores:
        return
    # The largest power of 2 that all places and sizes are multiples of, and at most 4.
    low_bits = 4
    for touch in touches:
        low_bits |= touch.size | int(np.bitwise_or.reduce(touch.where))
    unit = low_bits & -low_bits
    is_stored = np.unique(np.concatenate([_places(touches[number], unit) for number in stores]))
    places, numbers, values = [], [], []
    for number, touch in enumerate(touches):
        place = _places(touch, unit)
        value = touch.values.view(f"<u{unit}").ravel() if touch.is_store else np.zeros(len(place), f"<u{unit}")
        if not touch.is_store:
            at = np.searchsorted(is_stored, place).clip(max=len(is_stored) - 1)
            place = np.unique(place[is_stored[at] == place])
            value = value[: len(place)]
        places.append(place)
        values.append(value)
        numbers.append(np.full(len(place), number))
    place, number, value = (np.concatenate(each) for each in (places, numbers, values))
    time = np.array([touch.operation.time for touch in touches])
    stores_too = np.array([touch.is_store for touch in touches])
    order = np.lexsort((stores_too[number], time[number], place))
    place, number, value = place[order], number[order], value[order]
    is_store = stores_too[number]
    row = np.arange(len(place))
    last = np.concatenate([[-1], np.maximum.accumulate(np.where(is_store, row, -1))[:-1]])
    following = np.minimum.accumulate(np.where(is_store, row, len(row))[::-1])[::-1]
    of_loads = row[~is_store & (following < len(row))]
    first = np.concatenate([last[last >= 0], of_loads])
    second = np.concatenate([row[last >= 0], following[of_loads]])
    differs = ~(is_store[first] & is_store[second] & (value[first] == value[second]))
    kept = (place[first] == place[second]) & (number[first] != number[second]) & differs
    first, second = first[kept], second[kept]
    _, at = np.unique(number[first] * len(touches) + number[second], return_index=True)
    for a, b in zip(first[at].tolist(), second[at].tolist(), strict=True):
        yield Pair(touches[number[a]], touches[number[b]], int(place[a]))


def _places(touch: Touch, unit: int) -> Array:
    return (touch.where[:, None] + np.arange(0, touch.size, unit)).ravel()
