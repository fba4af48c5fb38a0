"""The common part of wrappers: workspaces, a Batch from the tensors of plan(), and buffers that graphs read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, BadTensor, NeverFits
from rocm_attn.integrations.flashinfer.batch import Batch
from rocm_attn.integrations.flashinfer.cells import given_cells
from rocm_attn.integrations.flashinfer.lengths import Int64Array, Lengths, on_host, paged_kv_len
from rocm_attn.integrations.flashinfer.page_lists import page_bounds


class Wrapper:
    """The members of a wrapper that programs need which pass workspaces around. No workspace is used.

    float_workspace_buffer: sets the wrapper's device; nothing is written to it
    """

    def __init__(self, float_workspace_buffer: Tensor) -> None:
        self.device = float_workspace_buffer.device
        # Engines pass this attribute of one wrapper to others, although it is not public in FlashInfer either.
        self._int_workspace_buffer = torch.empty(0, dtype=torch.uint8, device=self.device)

    def end_forward(self) -> None:
        """Does nothing, as in the releases of FlashInfer that have it."""


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

    def batch(
        self, q_indptr: Tensor, page_size: int, masks: tuple[Tensor | None, Tensor | None] = (None, None)
    ) -> Batch:
        """Returns a batch with new tokens of each sequence, a custom and a packed mask. Raises BadBatch, BadTensor."""
        given = [q_indptr, self.indptr, self.last_page_len]
        if self.seq_lens is not None:
            given.append(self.seq_lens.flatten())
        q, indptr, last_page_len, *seq_lens = on_host(*given)
        kv_len = paged_kv_len(indptr, last_page_len, page_size)
        if seq_lens and seq_lens[0].tolist() != kv_len.tolist():
            raise BadBatch(f"seq_lens are {seq_lens[0].tolist()}; indptr and last_page_len say {kv_len.tolist()}")
        lengths = Lengths(q, indptr[:-1], kv_len)
        return _batch(lengths, self.indices, int(indptr[-1]), masks)


def listed_batch(lengths: Lengths, indices: Tensor, indptr: Int64Array) -> Batch:
    """Makes a batch whose lengths are known on the host. Raises BadTensor."""
    return _batch(lengths, indices, int(indptr[-1]), (None, None))


def _batch(lengths: Lengths, indices: Tensor, count: int, masks: tuple[Tensor | None, Tensor | None]) -> Batch:
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64) or len(indices) < count:
        raise BadTensor(
            f"page indices are {indices.dtype} {list(indices.shape)}; they must be int32 or int64 in one dimension, "
            f"with the {count} entries that indptr ends with"
        )
    low, high = on_host(page_bounds(indices, count))[0].tolist()
    return Batch(lengths, indices, count, (low, high), given_cells(lengths, *masks, indices.device))


def keep(name: str, buffer: Tensor | None, values: Tensor) -> None:
    """Copies values to the beginning of a buffer of the caller's. Raises NeverFits, BadTensor."""
    if buffer is None:
        raise BadTensor(f"with use_cuda_graph the wrapper needs {name}; give it to the constructor")
    if len(values) > len(buffer):
        raise NeverFits(f"{len(values)} entries do not fit {name}, which has {len(buffer)}; make it larger")
    buffer[: len(values)].copy_(values, non_blocking=True)
