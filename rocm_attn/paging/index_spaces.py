"""The index spaces of the runtime: the integers that its arrays hold, by the names used everywhere.

    row      a row of the request table                         0 is reserved: all of it is page 0
    seq      a sequence of this step                            [0, num_seqs)
    token    a new token of this step, all sequences in order   [0, num_tokens)
    kv_index the index of a token in its sequence's KV          [0, kv_len)
    page_no  a page of a sequence                               kv_index // page_size
    page     a page of a pool                                   0 is reserved: all of it is zero
    slot     the location of a token's K and V in a pool        page * page_size + kv_index % page_size

A rope position is no kv_index: in a draft tree several tokens share a position.
Pages and slots belong to a Space; ids of one space mean nothing in another.
A sequence's last page holds (kv_len - 1) % page_size + 1 tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import torch

RESERVED_ROW = 0
RESERVED_PAGE = 0

Index = TypeVar(
    "Index",
    int,
    "np.ndarray[tuple[int, ...], np.dtype[np.int32]]",
    "np.ndarray[tuple[int, ...], np.dtype[np.int64]]",
    torch.Tensor,
)


@dataclass(frozen=True, slots=True)
class Space:
    """The pool (KV cache group) that a page id or slot id belongs to.

    An AttentionRuntime has FULL, and SWA for sliding-window layers. An engine may have more: one space for each of its
    KV cache groups, with any other lower-case names.
    """

    value: str

    FULL: ClassVar[Space]
    SWA: ClassVar[Space]

    @property
    def name(self) -> str:
        """The name for messages."""
        return self.value.upper()


Space.FULL, Space.SWA = Space("full"), Space("swa")


def space_of_states(spaces: Collection[Space]) -> Space:
    """The space of the states of layers whose rows stand for several tokens: tokens leave them as they leave windows.

    spaces: of the model's pages
    """
    return Space.SWA if Space.SWA in spaces else Space.FULL


def num_pages(kv_len: Index, page_size: int) -> Index:
    """Pages that hold kv_len tokens. Takes Python ints, NumPy arrays and torch tensors."""
    return (kv_len + (page_size - 1)) // page_size
