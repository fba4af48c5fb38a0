"""Batches of latent pages, given as lists of pages or as a table. Names and arguments are FlashInfer's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, BadTensor
from rocm_attn.integrations.flashinfer.batch import PlannedBatch, listed_batch
from rocm_attn.integrations.flashinfer.lengths import BatchLengths, Int64Array, on_host
from rocm_attn.integrations.flashinfer.signatures import Given, as_in_flashinfer


@dataclass(frozen=True)
class MLAPlanMetadata:
    """Lengths and pages of a batch: as lists of pages (csr), as a table (dense), or both; then the lists are used.

    qo_indptr: int32 [S + 1]; kv_indptr: int32 [S + 1 or more]; kv_indices: int32 [kv_indptr[S] or more]
    kv_len_arr, seq_lens: int32 [S], tokens of each sequence
    cum_seq_lens_q: int32 [S + 1]; block_tables: int32 [S, pages]
    """

    qo_indptr: Tensor | None = None
    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None
    kv_len_arr: Tensor | None = None
    cum_seq_lens_q: Tensor | None = None
    block_tables: Tensor | None = None
    seq_lens: Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    @as_in_flashinfer
    def csr(cls, given: Given) -> MLAPlanMetadata:
        """Makes a batch from lists of pages."""
        return MLAPlanMetadata(**vars(given))

    @classmethod
    @as_in_flashinfer
    def dense(cls, given: Given) -> MLAPlanMetadata:
        """Makes a batch from a table of pages."""
        return MLAPlanMetadata(**vars(given))

    @classmethod
    @as_in_flashinfer
    def dual(cls, given: Given) -> MLAPlanMetadata:
        """Makes a batch from both."""
        return MLAPlanMetadata(**vars(given))


def needed(tensor: Tensor | None) -> Tensor:
    """Returns a tensor that a plan needs. Raises BadBatch if it is None."""
    if tensor is None:
        raise BadBatch(
            "the plan lacks tensors; give qo_indptr, kv_indptr, kv_indices and kv_len_arr, or cum_seq_lens_q, "
            "block_tables and seq_lens"
        )
    return tensor


def batch_of(metadata: MLAPlanMetadata, page_size: int) -> PlannedBatch:
    """Returns the batch of a plan. Raises BadBatch, BadTensor."""
    lists = metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices, metadata.kv_len_arr
    if any(each is not None for each in lists):
        return _batch_of_lists(page_size, *map(needed, lists))
    table = needed(metadata.block_tables)
    q_indptr, kv_len = on_host(needed(metadata.cum_seq_lens_q), needed(metadata.seq_lens))
    if table.dim() != 2 or len(table) != len(kv_len):
        raise BadTensor(
            f"block_tables are {list(table.shape)}; they must have a row for each of {len(kv_len)} sequences"
        )
    pages = -(-kv_len // page_size)
    if pages.max(initial=0) > table.shape[1]:
        raise BadBatch(f"a sequence has {pages.max()} pages, and block_tables have room for {table.shape[1]}")
    is_page = torch.from_numpy(np.arange(table.shape[1]) < pages[:, None]).to(table.device)
    indptr = np.concatenate([[0], pages.cumsum()])
    return listed_batch(BatchLengths(q_indptr, indptr[:-1], kv_len), table[is_page], indptr)


def _batch_of_lists(
    page_size: int, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len: Tensor
) -> PlannedBatch:
    q, indptr, lens = on_host(qo_indptr, kv_indptr, kv_len)
    indptr = indptr[: len(lens) + 1]
    _check_pages(indptr, lens, page_size)
    return listed_batch(BatchLengths(q, indptr[:-1], lens), kv_indices, indptr)


def _check_pages(indptr: Int64Array, kv_len: Int64Array, page_size: int) -> None:
    if len(indptr) != len(kv_len) + 1 or indptr[0] != 0 or (np.diff(indptr) < -(-kv_len // page_size)).any():
        raise BadBatch(
            f"kv_indptr {indptr[:9].tolist()}... does not give the pages of {page_size} tokens that kv_len_arr "
            f"{kv_len[:9].tolist()}... needs"
        )
