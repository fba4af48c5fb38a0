"""The index tensors of a step: what `fill` reads, and what it derives from that."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

ALL_KEYS = 2**31 - 1  # a window that no sequence is longer than


@dataclass(frozen=True, slots=True)
class IndexTensors:
    """S padded sequences, T padded tokens; int32 and contiguous unless said.

    Read:
    counts:            [4]            num_seqs, num_tokens, step number, error word; fill sets bits of the last
    row_of_seq:        [S]            sequence -> row of the table
    kv_len:            [S]            tokens, new ones included
    q_len:             [S]            new tokens
    table:             [rows, width]  row and page_no -> page; the row stride is free
    prefix_len:        [S]            tokens that the sequence shares with its group, whole pages; empty: nothing does
    group_end:         [S]            one past the last sequence of its group; empty with prefix_len

    Written by every fill:
    q_indptr:          [S+1]  sequence -> first token
    last_token_of_seq: [S]    0 where the sequence has no new token
    position_of_token: [T]    place in the sequence's KV
    slot_of_token:     [T]    place in the pool

    Written where they have elements; empty when no kernel reads them:
    page_indptr:       [S+1]  sequence -> first entry of page_list
    page_list:         [L]    pages, sequence after sequence, then page 0
    last_page_len:     [S]    tokens in the last page, 1 where kv_len is 0; comes with page_indptr and page_list
    block_table:       [S, W] pages of each sequence, then page 0; W may exceed the table's width
    kv_len_int64:      [S]    int64
    mask_indptr:       [S+1]  int64, sequence -> first cell of its [q_len, kv_len] mask
    group_indptr:      [S+1]  group -> first of its sequences. A group has the number of its first sequence, and those
                              of other numbers are empty
    suffix_kv_len:     [S]    tokens behind the shared prefix, 0 for pads; comes with group_indptr
    suffix_page:       [S]    page_no of the first page behind it; comes with group_indptr
    """

    counts: Tensor
    row_of_seq: Tensor
    kv_len: Tensor
    q_len: Tensor
    table: Tensor
    prefix_len: Tensor
    group_end: Tensor
    q_indptr: Tensor
    last_token_of_seq: Tensor
    position_of_token: Tensor
    slot_of_token: Tensor
    page_indptr: Tensor
    page_list: Tensor
    last_page_len: Tensor
    block_table: Tensor
    kv_len_int64: Tensor
    mask_indptr: Tensor
    group_indptr: Tensor
    suffix_kv_len: Tensor
    suffix_page: Tensor
