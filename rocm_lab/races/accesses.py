"""Pairs of accesses to the same bytes that may conflict, among the many accesses of a launch.

All accesses to a place are looked at in the order in which they happened. Each is compared with the last store before
it, and each load with the next store after it. If these pairs are in order, so are all others, since order is
transitive: see C. Flanagan and S. Freund, "FastTrack: Efficient and Precise Dynamic Race Detection", 2009. Atomics are
in no order and yet no race, so each is also compared with every other access to its place that is none.
"""

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


class _Rows(NamedTuple):
    """Units of bytes that are accessed, one a row: the address, the number of the touch, and what is stored."""

    address: Array
    number: Array
    value: Array


def pairs_of(touches: Sequence[Touch]) -> Iterator[Pair]:
    """The pairs to be compared, each pair of touches once; not two atomics, nor two plain stores of the same value."""
    if not any(touch.is_store for touch in touches):
        return
    rows = _rows(touches)
    of_stores = np.array([touch.is_store for touch in touches])
    times = np.array([touch.operation.time for touch in touches])
    of_atomics = np.array([touch.operation.is_atomic for touch in touches])
    # An atomic loads before it stores.
    order = np.lexsort((of_stores[rows.number], times[rows.number], rows.address))
    address, number, value = (each[order] for each in rows)
    is_store, is_atomic = of_stores[number], of_atomics[number]
    row = np.arange(len(address))
    before = np.concatenate([[-1], np.maximum.accumulate(np.where(is_store, row, -1))[:-1]])
    after = np.minimum.accumulate(np.where(is_store, row, len(row))[::-1])[::-1]
    loads = row[~is_store & (after < len(row))]
    plain, atomic = _plain_and_atomic(address, is_atomic)
    first = np.concatenate([before[before >= 0], loads, np.minimum(plain, atomic)])
    second = np.concatenate([row[before >= 0], after[loads], np.maximum(plain, atomic)])
    num_atomics = is_atomic[first].astype(int) + is_atomic[second]
    stores_the_same = is_store[first] & is_store[second] & (num_atomics == 0) & (value[first] == value[second])
    kept = (address[first] == address[second]) & (number[first] != number[second]) & ~stores_the_same
    kept &= (is_store[first] | is_store[second]) & (num_atomics < 2)
    first, second = first[kept], second[kept]
    _, once = np.unique(number[first] * len(touches) + number[second], return_index=True)
    for a, b in zip(first[once].tolist(), second[once].tolist(), strict=True):
        yield Pair(touches[number[a]], touches[number[b]], int(address[a]))


def _plain_and_atomic(address: Array, is_atomic: Array) -> tuple[Array, Array]:
    """The rows of all pairs of a plain access and an atomic to one place; rows are ordered by place."""
    place = np.cumsum(np.concatenate([[0], address[1:] != address[:-1]]))
    mixed = np.flatnonzero((np.bincount(place, is_atomic) > 0) & (np.bincount(place, ~is_atomic) > 0))
    plain, atomic = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for low, high in zip(np.searchsorted(place, mixed), np.searchsorted(place, mixed, "right"), strict=True):
        each, other = low + np.flatnonzero(~is_atomic[low:high]), low + np.flatnonzero(is_atomic[low:high])
        plain.append(np.repeat(each, len(other)))
        atomic.append(np.tile(other, len(each)))
    return np.concatenate(plain), np.concatenate(atomic)


def _rows(touches: Sequence[Touch]) -> _Rows:
    """All that is stored, and what is loaded of the same places."""
    # The largest power of 2, at most 4, that all addresses and sizes are multiples of.
    bits = 4
    for touch in touches:
        bits |= touch.size | int(np.bitwise_or.reduce(touch.where))
    unit = bits & -bits
    addresses = [_addresses(touch, unit) for touch in touches]
    stored = np.unique(np.concatenate([each for each, touch in zip(addresses, touches, strict=True) if touch.is_store]))
    values = []
    for number, touch in enumerate(touches):
        if touch.is_store:
            values.append(touch.values.view(f"<u{unit}").ravel())
        else:
            loaded = addresses[number]
            at = np.searchsorted(stored, loaded).clip(max=len(stored) - 1)
            addresses[number] = np.unique(loaded[stored[at] == loaded])
            values.append(np.zeros(len(addresses[number]), f"<u{unit}"))
    counts = [len(each) for each in addresses]
    return _Rows(np.concatenate(addresses), np.repeat(np.arange(len(touches)), counts), np.concatenate(values))


def _addresses(touch: Touch, unit: int) -> Array:
    return (touch.where[:, None] + np.arange(0, touch.size, unit)).ravel()
