"""Torch twin of kernels/metadata/watch_pages.py: same signature, same results."""

import torch
from torch import Tensor

from rocm_attn.kernels.metadata.error_word import ERROR_WORD, PAGE_TAKEN
from rocm_attn.kernels.metadata.page_watch import ROW_WORDS, PageWatch
from rocm_attn.kernels.metadata.step_tensors import StepTensors

_LOW = 2**32 - 1


def watch_pages(step: StepTensors, engine_row: Tensor, watch: PageWatch, *, page_size: int) -> None:
    """Twin of launch_watch_pages; may be recorded."""
    num_rows, width = watch.entries.shape
    counts, num_seqs = step.counts, len(step.kv_len)
    now = counts[2].long()
    row = engine_row.long()
    not_of_pads = step.row_of_seq if step.pads.kv_len else step.kv_len
    live = (torch.arange(num_seqs, device=row.device) < counts[0]) & (row < num_rows) & (not_of_pads > 0)
    row = torch.where(live, row, 0)
    length = torch.where(live, step.kv_len, 0).long()
    begin = length - step.q_len
    page_no = torch.arange(width, device=row.device)
    table = step.table[torch.where(live, step.row_of_seq, 0).long(), :width].long()
    entries, cell = watch.entries[row], torch.where(live, row * width, -width)[:, None] + page_no
    last, other = _last_step(watch.rows[row].long(), now)
    last_no = (begin - 1).clamp(min=0)[:, None] // page_size
    last_entry, last_page = entries.gather(1, last_no).squeeze(1), table.gather(1, last_no).squeeze(1)
    since = last_entry >> 32
    goes_on = live & (begin > 0) & ((last_entry & _LOW) == last_page) & (since < now) & (last[:, 0] < now)
    goes_on &= (since >= last[:, 1]) & (begin >= last[:, 2]) & (begin <= last[:, 3])
    start = torch.where(goes_on, last[:, 1], now)

    first_page = int(step.terms.null_page)
    used = live[:, None] & (page_no < (length[:, None] + page_size - 1) // page_size)
    named = used & (table >= first_page) & (table < len(watch.pages))
    known = named & ((entries & _LOW) == table) & ((entries >> 32) >= start[:, None])
    written = watch.pages[torch.where(named, table, 0)]
    taken = known & ((written >> 32) > (entries >> 32)) & ((written & _LOW) != (cell & _LOW))
    taken &= (step.q_len[:, None] > 0) | ((page_no + 1) * page_size <= length[:, None])
    fresh = torch.where(named & (taken | ~known), (now << 32) | table, entries)
    twice = _write(step, cell, goes_on, known, entries, watch, now, page_size)
    error = (taken.any() | twice).to(torch.int32) * PAGE_TAKEN
    _put(watch.entries, row, live, fresh)
    words = torch.stack([now.expand_as(length), start, begin, length], 1).to(torch.int32)
    kept = watch.rows[row].view(num_seqs, -1, ROW_WORDS)
    kept = torch.where(
        (torch.arange(kept.shape[1], device=row.device) == other[:, None])[..., None], words[:, None], kept
    )
    _put(watch.rows, row, live, kept.flatten(1))
    counts[ERROR_WORD].bitwise_or_(error)


def _last_step(words: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
    """The words of each row's last step before this one, and the place of the other step of the two."""
    first, second = words[:, 0], words[:, ROW_WORDS]
    is_second = (second < now) & ((first >= now) | (second > first))
    last = torch.where(is_second[:, None], words[:, ROW_WORDS:], words[:, :ROW_WORDS])
    return last, torch.where(is_second, 0, 1)


def _write(
    step: StepTensors,
    cell: Tensor,
    goes_on: Tensor,
    known: Tensor,
    entries: Tensor,
    watch: PageWatch,
    now: Tensor,
    page_size: int,
) -> Tensor:
    """Records the pages that new tokens write; returns whether a page is another entry's too."""
    slot, width = step.slot_of_token.long(), cell.shape[1]
    token = torch.arange(len(slot), device=slot.device)
    page = slot // page_size
    writes = (token < step.counts[1]) & (slot >= int(step.terms.null_page) * page_size) & (page < len(watch.pages))
    seq = torch.where(writes, step.seq_of_token, 0).long()
    at = (step.position_of_token.long() // page_size).clamp(0, width - 1)
    writes &= cell[seq, at] >= 0  # of rows that are not watched it is below
    mine = cell[seq, at] & _LOW
    page = torch.where(writes, page, 0)
    before = watch.pages[page]
    since = entries[seq, at] >> 32
    is_known = goes_on[seq] & known[seq, at] & ((entries[seq, at] & _LOW) == page)
    taken = writes & is_known & ((before >> 32) > since) & ((before & _LOW) != mine)
    # The lowest and the highest cell that writes a page in this step: there are two if they differ.
    nothing = torch.full_like(watch.pages, -1)
    highest = nothing.scatter_reduce(0, page, torch.where(writes, mine, -1), "amax")
    lowest = torch.full_like(watch.pages, _LOW + 1).scatter_reduce(0, page, torch.where(writes, mine, _LOW + 1), "amin")
    taken |= writes & (highest[page] != lowest[page])
    watch.pages.copy_(torch.where(highest >= 0, (now << 32) | highest, watch.pages))
    return taken.any()


def _put(memory: Tensor, row: Tensor, live: Tensor, values: Tensor) -> None:
    """Writes the rows of live sequences, each of which has one of its own."""
    sequences = len(row)
    of_row = torch.full((len(memory) + 1,), sequences, dtype=torch.int64, device=row.device)
    of_row.scatter_(0, torch.where(live, row, len(memory)), torch.arange(sequences, device=row.device))
    of_row = of_row[:-1]
    has_one = of_row < sequences
    given = values[torch.where(has_one, of_row, 0)]
    memory.copy_(torch.where(has_one[:, None], given, memory))
