"""Torch twins of kernels/metadata: same signatures, same results, fixed shapes, no host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_attn.kernels.metadata.error_word import ERROR_WORD, LENGTH_BEYOND_BOUND
from rocm_attn.kernels.metadata.slot_layout import (
    COUNT_WORDS,
    ECHO,
    ECHOED_STEP,
    HEADER_WORDS,
    STEP,
    STEP_BEFORE,
    UPDATE_WORDS,
    WRONG_STEP,
)


def publish(
    slot: Tensor,
    counts_before: Tensor,
    counts: Tensor,
    row_of_seq: Tensor,
    kv_len: Tensor,
    q_len: Tensor,
    token_ids: Tensor,
    *,
    pad_kv_len: int,
    pad_q_len: int,
) -> None:
    """Twin of launch_publish. Reads the slot's header on the host: it runs outside of recordings, on a CPU slot."""
    num_seqs, num_tokens, _, has_ids = slot[:COUNT_WORDS].tolist()
    slot[ECHOED_STEP] = counts_before[STEP]
    slot[ECHO] = torch.where(counts_before[STEP] == slot[STEP_BEFORE], counts_before[ERROR_WORD], WRONG_STEP)
    counts.copy_(slot[:COUNT_WORDS])
    counts[ERROR_WORD].zero_()
    at = HEADER_WORDS
    for buffer, pad in ((row_of_seq, 0), (kv_len, pad_kv_len), (q_len, pad_q_len)):
        buffer[:num_seqs].copy_(slot[at : at + num_seqs])
        buffer[num_seqs:].fill_(pad)
        at += num_seqs
    num_ids = num_tokens * has_ids
    token_ids[:num_ids].copy_(slot[at : at + num_ids])
    token_ids[num_ids:].zero_()


def device_inputs(
    slot: Tensor,
    device_kv_len: Tensor,
    device_q_len: Tensor,
    device_token_ids: Tensor,
    counts: Tensor,
    kv_len: Tensor,
    q_len: Tensor,
    token_ids: Tensor,
) -> None:
    """Twin of launch_device_inputs; runs outside of recordings, on a CPU slot."""
    num_seqs, num_ids = int(slot[0]), len(device_token_ids)
    bounds = slot[HEADER_WORDS + num_seqs : HEADER_WORDS + 3 * num_seqs]
    kv_bound, q_bound = bounds.to(counts.device).view(2, num_seqs)
    given_kv, given_q, ids = (
        given.to(counts.device) for given in (device_kv_len[:num_seqs], device_q_len[:num_seqs], device_token_ids)
    )
    new = given_q.clamp(min=0).minimum(q_bound)
    length = given_kv.maximum(new).minimum(kv_bound)
    kv_len[:num_seqs].copy_(length)
    q_len[:num_seqs].copy_(new)
    counts[1] = new.sum()
    counts[ERROR_WORD] = torch.where(((new != given_q) | (length != given_kv)).any(), LENGTH_BEYOND_BOUND, 0)
    live = torch.arange(num_ids, device=counts.device) < counts[1]
    token_ids[:num_ids].copy_(torch.where(live, ids, 0))
    token_ids[num_ids:].zero_()


def table_update(updates: Tensor, table: Tensor, *, num_updates: int) -> None:
    """Twin of launch_table_update; runs outside of recordings."""
    row, column, entry = updates[: UPDATE_WORDS * num_updates].to(table.device).view(-1, UPDATE_WORDS).unbind(1)
    live = row > 0
    table[row[live].long(), column[live].long()] = entry[live]


def fill(
    counts: Tensor,
    row_of_seq: Tensor,
    kv_len: Tensor,
    q_len: Tensor,
    table: Tensor,
    q_indptr: Tensor,
    last_token_of_seq: Tensor,
    position_of_token: Tensor,
    slot_of_token: Tensor,
    *,
    page_size: int,
) -> None:
    """Twin of launch_fill."""
    num_seqs, num_tokens = row_of_seq.shape[0], slot_of_token.shape[0]
    ends = torch.cumsum(q_len, 0)
    q_indptr[:1].zero_()
    q_indptr[1:].copy_(ends)
    last_token_of_seq.copy_(torch.where(q_len > 0, ends - 1, 0))
    t = torch.arange(num_tokens, device=counts.device)
    seq = torch.searchsorted(ends, t, right=True)
    live = (t < counts[1]) & (seq < num_seqs)
    seq = seq.clamp(max=num_seqs - 1)
    position = torch.where(live, kv_len[seq] - ends[seq] + t, 0)
    page_no = (position // page_size).clamp(max=table.shape[1] - 1)
    page = table[row_of_seq[seq].long(), page_no.long()]
    position_of_token.copy_(position)
    slot_of_token.copy_(torch.where(live, page * page_size + position % page_size, 0))


def page_indptr(
    kv_len: Tensor, page_indptr: Tensor, last_page_len: Tensor, kv_len_int64: Tensor, *, page_size: int
) -> None:
    """Twin of launch_page_indptr."""
    page_indptr[:1].zero_()
    page_indptr[1:].copy_(torch.cumsum((kv_len + page_size - 1) // page_size, 0))
    last_page_len.copy_(torch.where(kv_len > 0, (kv_len - 1) % page_size + 1, 1))
    kv_len_int64.copy_(kv_len)


def page_list(
    row_of_seq: Tensor, kv_len: Tensor, table: Tensor, page_list: Tensor, *, page_size: int, programs_per_seq: int
) -> None:
    """Twin of launch_page_list; programs_per_seq changes nothing here."""
    num_seqs = row_of_seq.shape[0]
    ends = torch.cumsum((kv_len + page_size - 1) // page_size, 0)
    at = torch.arange(page_list.shape[0], device=kv_len.device)
    seq = torch.searchsorted(ends, at, right=True)
    live = seq < num_seqs
    seq = seq.clamp(max=num_seqs - 1)
    pages = (kv_len[seq] + page_size - 1) // page_size
    page_no = torch.where(live, at - (ends[seq] - pages), 0)
    page = table[row_of_seq[seq].long(), page_no.clamp(max=table.shape[1] - 1)]
    page_list.copy_(torch.where(live & (page_no < table.shape[1]), page, 0))


def block_table(row_of_seq: Tensor, kv_len: Tensor, table: Tensor, block_table: Tensor, *, page_size: int) -> None:
    """Twin of launch_block_table."""
    width = min(block_table.shape[1], table.shape[1])
    pages = (kv_len + page_size - 1) // page_size
    live = torch.arange(width, device=kv_len.device) < pages[:, None]
    block_table[:, width:].zero_()
    block_table[:, :width].copy_(torch.where(live, table[row_of_seq.long(), :width], 0))
