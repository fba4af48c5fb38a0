"""The lengths of a batch on the host, from the arguments of plan(). If they are on a device, one copy brings them."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import MOST_TOKENS
from rocm_attn.errors import BadBatch, BadTensor
from rocm_attn.machine.devices import require_tensor

Int64Array = npt.NDArray[np.int64]


class Sight(enum.Enum):
    """The keys that a batch's tokens see."""

    CAUSAL = "causal attention"
    ALL = "attention to all keys"
    CELLS = "a mask"


@dataclass(frozen=True, slots=True)
class BatchLengths:
    """A batch of S sequences.

    q_indptr:   [S + 1]  the first new token of each sequence
    first_page: [S]      the place of each sequence's first page in the list of all pages
    kv_len:     [S]      tokens, new ones included
    Raises BadBatch.
    """

    q_indptr: Int64Array
    first_page: Int64Array
    kv_len: Int64Array

    def __post_init__(self) -> None:
        _check_indptr("qo_indptr", self.q_indptr)
        if not len(self.q_indptr) - 1 == len(self.first_page) == len(self.kv_len):
            raise BadBatch(
                f"qo_indptr names {len(self.q_indptr) - 1} sequences and the KV's lengths {len(self.kv_len)}; indptr "
                "must have one entry more than there are sequences"
            )
        if self.q_indptr[-1] > MOST_TOKENS or (self.kv_len > MOST_TOKENS).any() or (self.kv_len < 0).any():
            raise BadBatch(f"lengths must be 0 to {MOST_TOKENS}")
        if (self.first_page < 0).any():
            raise BadBatch(f"indptr of the KV is {self.first_page[:9].tolist()}...; it must begin at 0 and never fall")

    @property
    def num_seqs(self) -> int:
        return len(self.kv_len)

    @property
    def num_tokens(self) -> int:
        return int(self.q_indptr[-1])

    @property
    def q_len(self) -> Int64Array:
        return np.diff(self.q_indptr)

    @property
    def max_kv_len(self) -> int:
        return int(self.kv_len.max(initial=0))

    @property
    def num_cells(self) -> int:
        """The number of pairs of a new token and a key of its sequence."""
        return int((self.q_len * self.kv_len).sum())

    def sight(self, *, causal: bool, has_mask: bool, one_is_causal: bool) -> Sight:
        """Returns the rule for the keys that are seen: causality, everything, or a mask.

        In a causal step, only sequences after the last one with KV may have fewer tokens in their KV than new ones.
        They have no KV and count as padding.
        one_is_causal: whether a batch with one new token per sequence may count as causal, since it sees the same keys
        """
        if has_mask:
            return Sight.CELLS
        with_kv = np.flatnonzero(self.kv_len)
        last = int(with_kv[-1]) + 1 if len(with_kv) else 0
        q_len = self.q_len
        can_be_causal = bool((q_len[:last] <= self.kv_len[:last]).all())
        if causal:
            return Sight.CAUSAL if can_be_causal else Sight.CELLS
        if one_is_causal and can_be_causal and q_len.max(initial=0) <= 1:
            return Sight.CAUSAL
        return Sight.ALL


def on_host(*tensors: Tensor) -> list[Int64Array]:
    """Returns copies of one-dimensional integers on the host. Those on a device come in one copy. Raises BadTensor."""
    for tensor in tensors:
        require_tensor("a list of lengths or boundaries", tensor)
        if tensor.dim() != 1 or tensor.is_floating_point() or tensor.is_complex():
            raise BadTensor(
                f"lengths and boundaries are {tensor.dtype} {list(tensor.shape)}; they must be integers of one "
                "dimension"
            )
    away = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    copied: Iterator[Tensor] = iter(())
    if away:
        joined = torch.cat([tensor.to(away[0].device, torch.int64) for tensor in away]).cpu()
        copied = iter(torch.split(joined, [len(tensor) for tensor in away]))
    return [
        (next(copied) if tensor.device.type != "cpu" else tensor.to(torch.int64, copy=True)).numpy()
        for tensor in tensors
    ]


def paged_kv_len(indptr: Int64Array, last_page_len: Int64Array, page_size: int) -> Int64Array:
    """Returns the tokens of each sequence: those of its full pages and of its last page. Raises BadBatch."""
    _check_indptr("indptr", indptr)
    pages = np.diff(indptr)
    if len(pages) != len(last_page_len):
        raise BadBatch(f"indptr names {len(pages)} sequences and last_page_len {len(last_page_len)}; give one for each")
    wrong = (pages > 0) & ((last_page_len < 1) | (last_page_len > page_size))
    if wrong.any():
        seq = int(wrong.argmax())
        raise BadBatch(
            f"last_page_len of sequence {seq} is {last_page_len[seq]}; with pages it must be 1 to page_size, "
            f"{page_size}"
        )
    kv_len: Int64Array = np.where(pages > 0, (pages - 1) * page_size + last_page_len, 0)
    return kv_len


def _check_indptr(name: str, indptr: Int64Array) -> None:
    if len(indptr) < 1 or indptr[0] != 0 or (np.diff(indptr) < 0).any():
        raise BadBatch(f"{name} is {indptr[:9].tolist()}...; it must begin at 0 and never fall")
