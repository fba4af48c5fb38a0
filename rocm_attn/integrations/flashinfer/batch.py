"""A planned batch, made from the tensors of plan(), and the room that it needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, BadProblem, BadTensor
from rocm_attn.integrations.flashinfer.cells import NO_MASKS, Masks, given_cells
from rocm_attn.integrations.flashinfer.lengths import BatchLengths, Int64Array, on_host, paged_kv_len
from rocm_attn.integrations.flashinfer.page_lists import page_bounds
from rocm_attn.kernels.tuning.tiles import next_power_of_2
from rocm_attn.machine.devices import require_tensor
from rocm_attn.machine.settings import whole_number


@dataclass(frozen=True, slots=True)
class BatchCapacity:
    """The size of the largest batch.

    num_seqs, num_tokens: of a batch
    num_entries:          page indices of a batch
    width:                pages of a sequence
    """

    num_seqs: int
    num_tokens: int
    num_entries: int
    width: int

    def holds(self, other: BatchCapacity) -> bool:
        """True if a batch that needs `other` fits."""
        return all(getattr(self, name) >= getattr(other, name) for name in self.__slots__)

    def grown(self, other: BatchCapacity) -> BatchCapacity:
        """Returns room for both, rounded up to powers of two."""
        return BatchCapacity(
            *(next_power_of_2(max(getattr(self, name), getattr(other, name), 1)) for name in self.__slots__)
        )


NO_ROOM = BatchCapacity(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A planned batch.

    pages:    page indices, sequence after sequence; the last list ends at num_entries
    page_ids: the smallest and the largest of them
    mask:     bool [cells], the keys that new tokens see, in place of causality
    """

    lengths: BatchLengths
    pages: Tensor
    num_entries: int
    page_ids: tuple[int, int]
    mask: Tensor | None = None

    def room(self, page_size: int) -> BatchCapacity:
        """Returns the room that the batch needs."""
        width = max(1, -(-self.lengths.max_kv_len // page_size))
        return BatchCapacity(self.lengths.num_seqs, self.lengths.num_tokens, self.num_entries, width)


@dataclass(frozen=True, slots=True)
class PagedKVLists:
    """The pages of each sequence, in the form of the arguments of FlashInfer's plan().

    indptr:        int [S + 1]; indices: int32 or int64 [indptr[S] or more]
    last_page_len: int [S], tokens of each last page
    seq_lens:      int [S], tokens of each sequence, which must agree with the other tensors; or None
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    seq_lens: Tensor | None = None

    def batch(self, q_indptr: Tensor, page_size: int, masks: Masks = NO_MASKS) -> PlannedBatch:
        """Returns the batch with these new tokens of each sequence. Raises BadBatch, BadTensor, BadProblem."""
        page_size = whole_number("page_size", page_size, BadProblem)
        given = [q_indptr, self.indptr, self.last_page_len]
        if self.seq_lens is not None:
            require_tensor("seq_lens", self.seq_lens)
            given.append(self.seq_lens.flatten())
        q, indptr, last_page_len, *seq_lens = on_host(*given)
        kv_len = paged_kv_len(indptr, last_page_len, page_size)
        if seq_lens and seq_lens[0].tolist() != kv_len.tolist():
            raise BadBatch(f"seq_lens are {seq_lens[0].tolist()}; indptr and last_page_len say {kv_len.tolist()}")
        return listed_batch(BatchLengths(q, indptr[:-1], kv_len), self.indices, indptr, masks)


def listed_batch(lengths: BatchLengths, indices: Tensor, indptr: Int64Array, masks: Masks = NO_MASKS) -> PlannedBatch:
    """Makes a batch whose lengths are known on the host. Raises BadTensor."""
    count = int(indptr[-1])
    require_tensor("page indices", indices)
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64) or len(indices) < count:
        raise BadTensor(
            f"page indices are {indices.dtype} {list(indices.shape)}; they must be int32 or int64 in one dimension, "
            f"with the {count} entries that indptr ends with"
        )
    low, high = on_host(page_bounds(indices, count))[0].tolist()
    # A copy: some wrappers read it at each run(), and an engine may have written its next step's pages by then.
    pages = indices[:count].clone()
    return PlannedBatch(lengths, pages, count, (low, high), given_cells(lengths, masks, indices.device))


def token_batch(lengths: BatchLengths, kv_indptr: Int64Array, masks: Masks, device: torch.device) -> PlannedBatch:
    """Makes a batch whose K and V are token after token, each token a page of its own."""
    num_keys = int(kv_indptr[-1])
    pages = torch.arange(max(num_keys, 1), dtype=torch.int32, device=device)
    return PlannedBatch(lengths, pages, num_keys, (0, num_keys - 1), given_cells(lengths, masks, device))
