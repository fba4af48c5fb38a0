"""SharedPrefixes: groups of a decode step's sequences that share prefix pages, read once (cascade attention).

Kernels that can attend by groups do so (providers/shared_prefix.py); other layers decode every sequence separately. The
results are equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rocm_attn.errors import BadBatch
from rocm_attn.machine.settings import require_kind, whole_number

_Int32Array = npt.NDArray[np.int32]
_MOST = 2**31 - 1


class NoPrefixes:
    """A step that reads every sequence by itself."""

    __slots__ = ()

    def select(self, order: npt.NDArray[np.int_]) -> Prefixes:
        return self

    def alone(self) -> Prefixes:
        return self

    def __reduce__(self) -> str:
        return "NO_PREFIXES"  # there is one; a copy, pickled or not, is that one


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Consecutive sequences of a decode step that share a prefix.

    num_seqs:   sequences, 1 or more
    prefix_len: tokens at the beginning of each sequence in shared pages, whole pages only; 0: none
    """

    num_seqs: int
    prefix_len: int


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """The prefix groups of a decode step, in the order of its sequences; every sequence is in one.

    Pass the same object in each step of the same requests: its groups are then checked against their pages only once.

    num_seqs:    sequences of all groups
    prefix_len:  int32 [num_seqs]  tokens that the sequence shares with its group
    group_begin: int32 [num_seqs]  the first sequence of its group
    group_end:   int32 [num_seqs]  one past the last

    Raises BadBatch for groups without sequences, and for lengths below 0; BadSetting for a part of a number.
    """

    groups: Sequence[PrefixGroup]
    num_seqs: int = field(init=False)

    def __post_init__(self) -> None:
        require_kind("groups", self.groups, Sequence, BadBatch)
        for group in self.groups:
            require_kind("a group", group, PrefixGroup, BadBatch)
        counts = [whole_number("num_seqs of a group", group.num_seqs) for group in self.groups]
        if min(counts, default=1) < 1 or sum(counts) > _MOST:
            raise BadBatch(
                f"groups have {_listed(counts)} sequences; each group needs at least one, and all of them have at most "
                f"{_MOST}"
            )
        lengths = [min(_MOST, whole_number("prefix_len of a group", group.prefix_len)) for group in self.groups]
        if min(lengths, default=0) < 0:
            raise BadBatch(f"a group has a prefix of {min(lengths)} tokens; it must be 0 or more")
        object.__setattr__(self, "groups", tuple(self.groups))
        object.__setattr__(self, "num_seqs", sum(counts))

    # Made after check(): more sequences than a step may have would take all memory.

    @cached_property
    def prefix_len(self) -> _Int32Array:
        return self._of_seqs([min(_MOST, group.prefix_len) for group in self.groups])

    @cached_property
    def group_begin(self) -> _Int32Array:
        return self._of_seqs(self._ends - np.diff(self._ends, prepend=0))

    @cached_property
    def group_end(self) -> _Int32Array:
        return self._of_seqs(self._ends)

    @property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.cumsum([group.num_seqs for group in self.groups], dtype=np.int64)

    def _of_seqs(self, of_groups: npt.ArrayLike) -> _Int32Array:
        """Each group's number, for each of its sequences."""
        repeated = np.repeat(np.array(of_groups, np.int32), [group.num_seqs for group in self.groups])
        repeated.flags.writeable = False  # a step reads the array that was checked
        return repeated

    def check(self, kv_len: _Int32Array, *, decodes: bool) -> None:
        """Refuses groups that do not fit a step. Raises BadBatch.

        kv_len:  int32 [num_seqs]
        decodes: True if every sequence of the step has one new token
        """
        if not decodes:
            raise BadBatch("only decode steps can share prefixes; leave them out of a step with other new tokens")
        if self.num_seqs != len(kv_len):
            counts = [group.num_seqs for group in self.groups]
            raise BadBatch(
                f"groups have {_listed(counts)} sequences and the step has {len(kv_len)}; put every sequence into "
                "one group, in the order of the step"
            )
        wrong = self.prefix_len >= kv_len
        if wrong.any():
            seq = int(wrong.argmax())
            raise BadBatch(
                f"sequence {seq} has {kv_len[seq]} tokens and a prefix of {self.prefix_len[seq]}; a sequence must be "
                "longer than its prefix"
            )

    def check_pages(self, entries: _Int32Array, rows: _Int32Array, page_size: int) -> None:
        """Refuses groups whose rows do not have the same whole pages in their prefixes. Raises BadBatch.

        entries: int32 [num_rows, width], the pages of each row
        rows:    int32 [num_seqs]
        """
        torn = self.prefix_len % page_size != 0
        if torn.any():
            raise BadBatch(
                f"sequence {int(torn.argmax())} has a prefix of {self.prefix_len[torn][0]} tokens in pages of "
                f"{page_size}; a prefix must fill whole pages"
            )
        # Compares all pages: rows over kept pages may have one of them in common, and not those before it.
        begin, ends = self.group_begin, self.prefix_len // page_size
        end = int(ends.max(initial=0))
        others = entries[rows, :end] != entries[rows[begin], :end]
        strangers = (others & (np.arange(end) < ends[:, None])).any(axis=1)
        if strangers.any():
            seq = int(strangers.argmax())
            raise BadBatch(
                f"sequence {seq} does not share the first {self.prefix_len[seq]} tokens with sequence {begin[seq]}; "
                "fork its row from that one's, admit both over the same kept pages, or put it into another group"
            )

    def select(self, order: npt.NDArray[np.int_]) -> Prefixes:
        """The groups of the sequences with these indices, in this order; a group may become several."""
        ends, lens = self.group_end[order], self.prefix_len[order]
        begins = np.flatnonzero(np.diff(ends, prepend=-1))
        counts = np.diff(begins, append=len(order))
        return SharedPrefixes([PrefixGroup(int(n), int(lens[at])) for at, n in zip(begins, counts, strict=True)])

    def alone(self) -> Prefixes:
        """The same number of sequences, each in a group of its own that shares nothing."""
        return SharedPrefixes([PrefixGroup(1, 0)] * self.num_seqs)


Prefixes = NoPrefixes | SharedPrefixes
NO_PREFIXES = NoPrefixes()


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts)) or "no"
