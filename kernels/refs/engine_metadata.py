"""Torch twins of the launches of kernels/metadata that read an engine's tensors: same signatures, same results."""

import torch
from torch import Tensor

from rocm_attn.kernels.metadata.engine_tensors import (
    Q_BOUNDARIES,
    Q_EACH_ONE,
    EngineLengths,
    GatherSource,
    LengthBounds,
    PublishedLengths,
)
from rocm_attn.kernels.metadata.error_word import (
    ERROR_WORD,
    LENGTH_BEYOND_BOUND,
    PAGE_NOT_IN_POOL,
    ROW_NOT_IN_TABLE,
    ROW_TWICE,
    SLOT_NOT_IN_TABLE,
    TOO_FEW_GIVEN,
)
from rocm_attn.kernels.metadata.slot_layout import COUNT_WORDS, STEP
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS, StepTensors
from rocm_attn.kernels.refs.metadata import echo_step_before, first_page_seen


def publish_engine(
    slot: Tensor, counts_before: Tensor, given: EngineLengths, bounds: LengthBounds, to: PublishedLengths
) -> None:
    """Twin of launch_publish_engine. Reads the slot's header on the host: it runs outside of recordings."""
    num_seqs, num_padded = int(slot[0]), len(to.kv_len)
    echo_step_before(slot, counts_before)
    seq = torch.arange(num_seqs, device=to.counts.device)
    row = seq if given.rows is None else given.rows[:num_seqs].long()
    in_table = (row >= 0) & (row < bounds.rows.num)
    row = torch.where(in_table, row, 0)
    length, bound = given.kv_len[:num_seqs].long(), torch.full_like(seq, bounds.kv_len)
    lists = bounds.rows.csr_indptr
    if lists is not None:
        pages = lists[row + 1].long() - lists[row].long()
        bound = bound.minimum(pages * bounds.page_size)
    within = (length >= 0) & (length <= bound)
    new, token_end = _new_tokens(given, num_seqs, bounds.num_tokens)
    taken = token_end.diff(prepend=seq.new_zeros(1))
    fits = within & (taken == new) & (new <= bounds.max_q_len)
    if bounds.num_cells:
        keys = length.clamp(0, ALL_KEYS)
        has_room = (taken * keys).cumsum(0) <= bounds.num_cells
        fits &= has_room
        to.keys_of_cells.zero_()
        to.keys_of_cells[:num_seqs].copy_(torch.where(has_room, keys, 0))
    has_kv = in_table & (length > 0)
    if given.q_form != Q_EACH_ONE and bounds.causal:
        fits &= new <= length
    elif given.q_form != Q_EACH_ONE:
        has_kv = in_table & ((length > 0) | (new > 0))
    is_live = has_kv & fits
    few = (new > 0) & (new < bounds.min_q_len)
    cut = ((in_table & ~within) | (has_kv & (~fits | few))).any()
    if given.q_form == Q_BOUNDARIES and num_seqs:
        assert given.q is not None
        cut |= given.q[0] != 0
    if given.q_form != Q_EACH_ONE:
        live_after = is_live.flip(0).cumsum(0).flip(0) > 0
        cut |= (in_table & ~has_kv & (new != 0) & live_after).any()
    stored, named = row[is_live & (length > 0) & (taken > 0) & (given.rows is not None)], bounds.rows.named
    is_twice = len(stored.unique()) < len(stored)
    named[stored] = slot[STEP].to(named.device)
    own_row = seq + 1 if to.gathered else row
    of_pad = taken.clamp(to.pad_kv_len, bounds.kv_len) if to.pad_kv_len else 0
    pads = num_padded - num_seqs
    for buffer, values, pad in (
        (to.engine_row, torch.where(is_live, row, 0), 0),
        (to.row_of_seq, torch.where(is_live, own_row, 0), 0),
        (to.kv_len, torch.where(is_live, length, of_pad), to.pad_kv_len),
        (to.q_len, taken, to.pad_q_len),
    ):
        buffer.copy_(torch.cat([values, values.new_full((pads,), pad)]))
    nothing = seq.new_zeros(1)
    error = cut.to(torch.int32) * LENGTH_BEYOND_BOUND | (~in_table).any().to(torch.int32) * ROW_NOT_IN_TABLE
    error |= is_twice * ROW_TWICE
    to.counts.copy_(slot[:COUNT_WORDS])
    to.counts[0] = torch.cat([nothing, torch.where(is_live, seq + 1, 0)]).amax()
    to.counts[1] = torch.cat([nothing, torch.where(is_live, token_end, 0)]).amax()
    to.counts[ERROR_WORD] = error


def _new_tokens(given: EngineLengths, num_seqs: int, most: int) -> tuple[Tensor, Tensor]:
    """New tokens of each sequence, as the engine gives them, and their ends among the step's; int64 both."""
    if given.q_form == Q_BOUNDARIES:
        assert given.q is not None
        boundaries = given.q[: num_seqs + 1].long()
        ends = boundaries[1:]
        return boundaries.diff(), torch.where(ends <= most, ends, 0).clamp(min=0).cummax(0).values
    ones = torch.ones(num_seqs, dtype=torch.int64, device=given.kv_len.device)
    new = ones if given.q is None else given.q[:num_seqs].long()
    return new, new.clamp(0, most).cumsum(0).clamp(max=most)


def gather_table(source: GatherSource, engine_row: Tensor, kv_len: Tensor, table: Tensor, *, page_size: int) -> None:
    """Twin of launch_gather_table; may be recorded."""
    num_seqs, (_, table_width) = len(kv_len), table.shape
    page_no = torch.arange(table_width, device=table.device)
    column = (page_no * page_size if source.has_slots else page_no)[None, :]
    row = engine_row.long()[:, None]
    entries = source.entries
    if source.csr_indptr is None:
        is_entry = column < entries.shape[1]
        entry = entries[row, column.clamp(max=entries.shape[1] - 1)].long()
    else:
        column = source.csr_indptr[row].long() + column
        # Entries of a list past the end of all entries give -1.
        is_entry = (column >= 0) & (column < source.csr_indptr[row + 1].long().clamp(max=len(entries)))
        entry = entries[torch.where(is_entry, column, 0)].long()
    entry = torch.where(is_entry, entry, -1)
    if source.slot_map is not None:
        slot = entry if source.has_slots else entry * page_size
        in_map = (slot >= 0) & (slot < len(source.slot_map))
        entry = torch.where(in_map, source.slot_map[torch.where(in_map, slot, 0)].long(), -1)
    page = entry // page_size if source.has_slots or source.slot_map is not None else entry
    page = torch.where((entry >= 0) & (page <= torch.iinfo(torch.int32).max), page, -1)
    live = page_no[None, :] < ((kv_len + page_size - 1) // page_size)[:, None]
    mine = table[1 : num_seqs + 1]
    mine.copy_(torch.where(live, page.to(torch.int32), mine))


def check_pages(
    step: StepTensors, num_pages: Tensor, *, page_size: int, window_left: int, spans_pass: bool, chunk: int = ALL_KEYS
) -> None:
    """Twin of launch_check_pages; may be recorded."""
    (_, table_width), device = step.table.shape, step.counts.device
    seq, page_no = (torch.arange(n, device=device) for n in (len(step.kv_len), table_width))
    # The largest published length fits a row; tokens before the KV, which short sequences have, see no key.
    pages = torch.where(seq < step.counts[0], (step.kv_len + page_size - 1) // page_size, 0)
    window_no = first_page_seen(step, page_size, window_left, chunk)
    first_no = window_no.minimum(_first_of_spans(step) // page_size) if spans_pass else window_no
    looked_at = (page_no >= first_no[:, None]) & (page_no < pages[:, None])
    page = step.table[step.row_of_seq.long()]
    is_none = (page < 0) | (page >= num_pages)
    if step.terms.null_page:
        is_none |= (page == 0) & (page_no < window_no[:, None])
    is_wrong = (looked_at & is_none).any(1)
    of_pad = step.q_len.clamp(min=step.pads.kv_len) if step.pads.kv_len else 0
    step.kv_len.copy_(torch.where(is_wrong, of_pad, step.kv_len))
    step.row_of_seq.masked_fill_(is_wrong, 0)
    step.counts[ERROR_WORD].bitwise_or_(is_wrong.any().to(torch.int32) * PAGE_NOT_IN_POOL)


def _first_of_spans(step: StepTensors) -> Tensor:
    """The first key of the spans that each sequence's new tokens are in; past all keys if there are none."""
    end = step.q_len.long().cumsum(0)
    token = torch.arange(len(step.span_end), device=end.device)
    seq = torch.searchsorted(end, token, right=True)
    in_span = (token < step.counts[1]) & (seq < len(end)) & (step.span_end > 0)
    begin = torch.where(in_span, step.span_begin.clamp(min=0), ALL_KEYS)
    return torch.full_like(step.kv_len, ALL_KEYS).scatter_reduce(0, seq.clamp(max=len(end) - 1), begin, "amin")


def take_slots(given: Tensor, slot_map: Tensor | None, to: StepTensors, *, page_size: int) -> None:
    """Twin of launch_take_slots; may be recorded."""
    counts, slot_of_token, null_page = to.counts, to.slot_of_token, to.terms.null_page
    num_given = min(len(given), len(slot_of_token))
    is_given = torch.arange(num_given, device=counts.device) < counts[1]
    slot = torch.where(is_given, given[:num_given].long(), -1)
    if slot_map is not None:
        in_map = (slot >= 0) & (slot < len(slot_map))
        found = torch.where(in_map, slot_map[torch.where(in_map, slot, 0)].long(), -1)
        slot = torch.where(slot >= len(slot_map), 1 << 62, found)
    wanted = slot_of_token[:num_given]
    is_same = is_given & (slot == wanted)
    strays = is_given & (slot >= (page_size if null_page else 0)) & (slot != wanted)
    dropped = 0 if null_page else -1
    counts[ERROR_WORD].bitwise_or_(strays.any().to(torch.int32) * SLOT_NOT_IN_TABLE)
    counts[ERROR_WORD].bitwise_or_((counts[1] > len(given)).to(torch.int32) * TOO_FEW_GIVEN)
    wanted.copy_(torch.where(is_same, wanted, dropped))
    slot_of_token[num_given:].fill_(dropped)


def pack_mask(cells: Tensor, positions: Tensor, window_left: int, to: StepTensors) -> None:
    """Twin of launch_pack_mask; may be recorded."""
    words, position_of_token = to.mask_words, to.mask_positions
    needed = to.mask_indptr[-1]
    is_short = (needed > len(cells)) | (to.counts[1] > len(positions))
    to.counts[ERROR_WORD].bitwise_or_(is_short.to(torch.int32) * TOO_FEW_GIVEN)
    # There are words for all cells of the largest step, so none is left out that a kernel reads.
    num_words = min(len(words), -(-len(cells) // 32))
    cell = torch.arange(32 * num_words, device=cells.device)
    is_given = (cell < needed) & (cell < len(cells))
    bits = (cells.view(torch.uint8)[torch.where(is_given, cell, 0)] != 0) & is_given
    # Added up in 64 bits; the highest bit of a word is its sign.
    packed = (bits.view(-1, 32).long() << torch.arange(32, device=cells.device)).sum(1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    of_step = 32 * torch.arange(len(words), device=cells.device) < needed
    words[:num_words].copy_(torch.where(of_step[:num_words], packed, words[:num_words]))
    words[num_words:].masked_fill_(of_step[num_words:], 0)
    num_given = min(len(positions), len(position_of_token))
    live = torch.arange(num_given, device=cells.device) < to.counts[1]
    position_of_token[:num_given].copy_(torch.where(live, positions[:num_given], 0))
    position_of_token[num_given:].zero_()
    if to.window_start.numel():
        seq = to.seq_of_token.long()
        counted_from = torch.maximum(position_of_token, (to.kv_len - to.q_len)[seq])
        live = torch.arange(len(position_of_token), device=cells.device) < to.counts[1]
        to.window_start.copy_(torch.where(live, counted_from - window_left, 0))
