"""Shards: how a model is divided over tensor-parallel ranks: the elements of its matrices that each rank holds.

Heads, MLPs and vocabularies can be divided over any number of ranks. If heads or an MLP do not divide, the last ranks
hold zeros in the place of the missing elements: a head of zeros gives zeros, and so does an element of an MLP. See
cut.py for their cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# Matrix units take rows and columns of bf16 in units of 16 bytes; sizes that divide evenly are left unchanged.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class ShardRange:
    """A rank's part of one dimension: elements start to stop - 1 of the whole, then zeros up to size."""

    start: int
    stop: int
    size: int

    @classmethod
    def whole(cls, size: int) -> ShardRange:
        """All of a dimension."""
        return cls(0, size, size)

    @property
    def num_real(self) -> int:
        """Elements that are not padding; 0 on a rank that holds nothing else."""
        return self.stop - self.start

    def after(self, first: int) -> ShardRange:
        """The same span, moved by `first` elements."""
        return ShardRange(first + self.start, first + self.stop, self.size)

    def of_elements(self, per_unit: int) -> ShardRange:
        """The same span counted in elements, of which a unit (a head, an expert's row) has per_unit."""
        return ShardRange(self.start * per_unit, self.stop * per_unit, self.size * per_unit)

    def of_each(self, rows: GroupedRows) -> Iterator[ShardRange]:
        """The rows of each unit of the span, one range after the other; those of padding are empty."""
        for unit in range(self.start, self.start + self.size):
            group, place = divmod(min(unit, self.stop), rows.units)
            first = group * rows.of_group + rows.begin + place * rows.size
            yield ShardRange(first, first + rows.size * (unit < self.stop), rows.size)


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Where the rows of units lie in a tensor that has groups of units, with rows of other kinds between them.

    units:    of a group
    of_group: rows of the tensor for each group
    begin:    the first row, among those of a group, of its first unit
    size:     rows of a unit
    """

    units: int
    of_group: int
    begin: int
    size: int


@dataclass(frozen=True, slots=True)
class HeadSpans:
    """The heads of one rank. Query head i reads KV head i // (q.size // kv.size), like on one rank."""

    q: ShardRange
    kv: ShardRange


@dataclass(frozen=True, slots=True)
class Shard:
    """One of the ranks that share a model: rank, from 0 to num_ranks - 1."""

    rank: int
    num_ranks: int

    def span(self, size: int) -> ShardRange:
        """The rank's part of a dimension of `size` elements that is cut in order, as evenly as possible."""
        per_rank = -(-size // self.num_ranks)
        if size % self.num_ranks:
            per_rank = -(-per_rank // _ALIGNMENT) * _ALIGNMENT
        return _cut(size, self.rank * per_rank, per_rank)

    def heads(self, num_q_heads: int, num_kv_heads: int) -> HeadSpans:
        """The rank's query heads, with the KV heads that they read.

        A KV head is never cut. If there are fewer of them than ranks, each is held by several ranks, which share its
        query heads; every KV head has the same number of ranks. For that the KV heads are padded to the next number
        that divides the number of ranks or is a multiple of it, and the query heads of each to a multiple of the ranks
        that hold it.
        """
        group = num_q_heads // num_kv_heads
        filled = self._filled_kv_heads(num_kv_heads)
        holders = max(1, self.num_ranks // filled)
        if holders == 1:
            kv = _cut(num_kv_heads, self.rank * filled // self.num_ranks, filled // self.num_ranks)
            return HeadSpans(q=kv.of_elements(group), kv=kv)
        kv_head, part = divmod(self.rank, holders)
        per_rank = -(-group // holders)
        of_group = _cut(group if kv_head < num_kv_heads else 0, part * per_rank, per_rank)
        first = kv_head * group
        q = ShardRange(first + of_group.start, first + of_group.stop, per_rank)
        return HeadSpans(q=q, kv=_cut(num_kv_heads, kv_head, 1))

    def _filled_kv_heads(self, num_kv_heads: int) -> int:
        ranks = self.num_ranks
        if num_kv_heads >= ranks:
            return -(-num_kv_heads // ranks) * ranks
        return next(number for number in range(num_kv_heads, ranks + 1) if ranks % number == 0)


def _cut(whole: int, start: int, size: int) -> ShardRange:
    """`size` elements from `start` on, of which those at or after `whole` are padding."""
    return ShardRange(min(start, whole), min(start + size, whole), size)


WHOLE = Shard(0, 1)
