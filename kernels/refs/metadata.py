"""Torch twins of kernels/metadata: same signatures, same results, fixed shapes, no host synchronisation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW, Visibility
from rocm_attn.kernels.launch import as_launch
from rocm_attn.kernels.metadata.error_word import (
    BAD_PARENT,
    ERROR_WORD,
    LENGTH_BEYOND_BOUND,
    SHARED_TOKEN,
    SPANS_OVERLAP,
    TOKEN_WITHOUT_PAGE,
    UNSTORED_TOKEN,
    WINDOW_WITHOUT_PAGE,
)
from rocm_attn.kernels.metadata.given_inputs import GivenInputs
from rocm_attn.kernels.metadata.slot_layout import (
    COUNT_WORDS,
    ECHO,
    ECHOED_STEP,
    MOST_RUNS,
    MOST_TAKEN,
    RUNS_BEFORE,
    STEP,
    STEP_BEFORE,
    TAKEN_BY_GRAPH,
    UPDATE_WORDS,
    WRONG_STEP,
    slot_parts,
)
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS, NO_PARENT, StepTensors


def _publish(slot: Tensor, counts_before: Tensor, to: StepTensors) -> None:
    """Twin of launch_publish. It reads the slot's header on the host, so a recorder notes it as one launch."""
    num_seqs, num_tokens, _, has_ids = slot[:COUNT_WORDS].tolist()
    echo_step_before(slot, counts_before)
    counts = slot[:COUNT_WORDS].clone()
    counts[ERROR_WORD] = 0
    to.counts.copy_(counts)  # in one copy: if an interrupt keeps the step's number, it keeps no word of the slot's
    parts = slot_parts(num_seqs, num_tokens * has_ids)
    for buffer, part, pad in (
        (to.row_of_seq, parts.rows, 0),
        (to.kv_len, parts.kv_len, to.pads.kv_len),
        (to.q_len, parts.q_len, to.pads.q_len),
        (to.token_ids, parts.token_ids, 0),
        *(((to.prefix_len, parts.prefix_len, 0), (to.group_end, parts.group_end, 0)) if to.prefix_len.numel() else ()),
    ):
        num_real = part.stop - part.start
        buffer[:num_real].copy_(slot[part])
        buffer[num_real:].fill_(pad)
    to.kv_len.masked_fill_(to.kv_len == 0, to.pads.kv_len)


publish = as_launch(_publish)


@as_launch
def take_inputs(slots: Tensor, runs: Tensor, to: StepTensors) -> None:
    """Twin of launch_take_inputs. It reads the slots on the host, so a recorder notes it as one launch."""
    assert max(to.row_of_seq.shape[0], to.token_ids.shape[0]) <= MOST_TAKEN, "no such step is taken by its graph"
    run = int(runs)
    runs.fill_((run + 1) & MOST_RUNS)
    for slot in slots:
        if slot[ECHO] == TAKEN_BY_GRAPH and slot[RUNS_BEFORE] == run:
            _publish(slot, to.counts, to)


def echo_step_before(slot: Tensor, counts_before: Tensor) -> None:
    """Twin of the kernels' echo_step_before."""
    slot[ECHOED_STEP] = counts_before[STEP]
    slot[ECHO] = torch.where(counts_before[STEP] == slot[STEP_BEFORE], counts_before[ERROR_WORD], WRONG_STEP)


def place_mask(bits: Tensor, positions: Tensor, keys_before: int, window_left: int, to: StepTensors) -> None:
    """Twin of launch_place_mask; runs outside of recordings."""
    to.mask_start.copy_((to.kv_len - to.q_len - keys_before).clamp(min=0))
    to.mask_words.view(torch.uint8)[: len(bits)].copy_(bits)
    num_given = min(len(positions), len(to.mask_positions))
    to.mask_positions.zero_()
    to.mask_positions[:num_given].copy_(positions[:num_given])
    token = torch.arange(len(to.mask_positions), device=to.counts.device)
    to.mask_positions.masked_fill_(token >= to.counts[1], 0)
    if to.window_start.numel():
        end = to.q_len.long().cumsum(0)
        seq = torch.searchsorted(end, token, right=True)
        live = (token < to.counts[1]) & (seq < len(end))
        counted_from = torch.maximum(to.mask_positions, (to.kv_len - to.q_len)[seq.clamp(max=len(end) - 1)])
        to.window_start.copy_(torch.where(live, counted_from - window_left, 0))


def place_trees(parents: Tensor, nodes_before: int, branches: int, window_left: int, to: StepTensors) -> None:
    """Twin of launch_place_trees; may be recorded."""
    num_tokens = len(to.mask_positions)
    if not parents.numel():
        to.mask_positions.zero_()
        to.window_start.zero_()
        to.mask_start.copy_((to.kv_len - to.q_len - nodes_before).clamp(min=0))
        return
    new = to.q_len.long()
    nodes = new + (to.kv_len - new).clamp(0, nodes_before)
    start, before = to.kv_len - nodes, nodes - new
    to.mask_start.copy_(start.clamp(min=0))
    seq = torch.arange(len(new), device=new.device)
    node = torch.arange(parents.shape[1], device=new.device)
    given = parents[seq.clamp(max=len(parents) - 1)].long()
    # Nodes before each one may be its parent, but none of the same step, if there are steps.
    end = node // max(branches, 1) * max(branches, 1)
    is_parent = (given >= ((end - branches).clamp(min=0) if branches else 0)) & (given < end)
    is_none = (given < 0) & ((end == 0) | (branches == 0))
    is_new = (node >= before[:, None]) & (node < nodes[:, None]) & (seq < to.counts[0])[:, None]
    is_wrong = (is_new & ~is_parent & ~is_none).any()
    to.counts[ERROR_WORD].bitwise_or_(is_wrong.to(torch.int32) * BAD_PARENT)
    sees = _ancestors(torch.where(is_parent, given, -1))
    depth = sees.sum(2) - 1
    token = torch.arange(num_tokens, device=new.device)
    end = new.cumsum(0)
    of_token = torch.searchsorted(end, token, right=True)
    live = (token < to.counts[1]) & (of_token < len(new))
    of_token = of_token.clamp(max=len(new) - 1)
    of_tree = torch.where(live, before[of_token] + token - (end - new)[of_token], 0).clamp(max=len(node) - 1)
    position = start[of_token] + depth[of_token, of_tree]
    to.mask_positions.copy_(torch.where(live, position, 0))
    if to.window_start.numel():
        # The place of the ancestor that is window_left nodes up is the first key of the window.
        is_oldest = sees & (depth[:, None, :] == depth[:, :, None] - window_left)
        oldest = torch.where(is_oldest, node, -1).amax(2)[of_token, of_tree]
        first_key = torch.where(oldest >= 0, start[of_token] + oldest, position - window_left)
        to.window_start.copy_(torch.where(live, first_key, 0))
    _write_tree_cells(sees, before, nodes, to.mask_words.view(torch.uint8))


def place_spans(spans: Tensor, to: StepTensors) -> None:
    """Twin of launch_place_spans; runs outside of recordings."""
    to.mask_start.copy_(to.kv_len)
    end = to.q_len.long().cumsum(0)
    token = torch.arange(len(to.mask_positions), device=to.counts.device)
    seq = torch.searchsorted(end, token, right=True)
    live = (token < to.counts[1]) & (seq < len(end))
    seq = seq.clamp(max=len(end) - 1)
    place = torch.where(live, to.kv_len[seq] - end[seq] + token, 0)
    to.mask_positions.copy_(place.clamp(min=0))
    holds = live & (spans[:, :1] == seq) & (spans[:, 1:2] <= place) & (place < spans[:, 2:])
    found = holds.sum(0)
    none = token.new_full((1, len(token)), ALL_KEYS)
    begin = torch.cat([torch.where(holds, spans[:, 1:2], ALL_KEYS), none]).amin(0)
    to.span_begin.copy_(torch.where(found > 0, begin, 0))
    to.span_end.copy_(torch.cat([torch.where(holds, spans[:, 2:], 0), 0 * none]).amax(0))
    to.counts[ERROR_WORD].bitwise_or_((found > 1).any().to(torch.int32) * SPANS_OVERLAP)


def visible_ranges(step: StepTensors, visibility: Visibility) -> tuple[Tensor, Tensor]:
    """The first keys and the ends that launch_visible_ranges writes, int32 [T] each; may be recorded."""
    num_tokens = len(step.position_of_token)
    live = torch.arange(num_tokens, device=step.counts.device) < step.counts[1]
    seq, place = step.seq_of_token.long(), step.position_of_token
    length = step.kv_len[seq]
    right = visibility.window_right
    end = length if right == UNLIMITED_WINDOW else place + 1 + (length - place - 1).clamp(max=right)
    first = torch.zeros_like(place)
    if visibility.windowed:
        first = (place - visibility.window_left).clamp(min=0)
    if visibility.chunk:
        first = torch.maximum(first, place - place % visibility.chunk)
    if visibility.masked and step.mask_start.numel():
        in_span = (step.span_begin <= place) & (place < step.span_end)
        has_cells = step.mask_start[seq] < length
        end = torch.where(in_span, torch.maximum(end, step.span_end), end)
        end = torch.where(has_cells, length, end)
        if visibility.spans_pass:
            first = torch.where(in_span, torch.minimum(first, step.span_begin.clamp(min=0)), first)
        if visibility.windowed:
            first = torch.where(has_cells, step.window_start.clamp(min=0), first)
    end = torch.where(live, torch.minimum(end, length).clamp(min=0), 0)
    return torch.minimum(first, end).int(), end.int()


def _ancestors(parent: Tensor) -> Tensor:
    """bool [seqs, n, n]: True for a node and its ancestors, itself included, from parents [seqs, n], -1 for none."""
    num_nodes = parent.shape[1]
    node = torch.arange(num_nodes, device=parent.device)
    reach = (parent[:, :, None] == node) | (node[:, None] == node)
    steps = 1
    while steps < num_nodes:
        # Reaching in s steps twice is reaching in 2 s; float32 counts these exactly.
        reach = torch.bmm(reach.float(), reach.float()) > 0
        steps *= 2
    return reach


def _write_tree_cells(sees: Tensor, before: Tensor, nodes: Tensor, mask_bytes: Tensor) -> None:
    """Writes the cells of new nodes [before, nodes) of each sequence's tree; all other bits stay unchanged."""
    num_seqs, num_nodes, _ = sees.shape
    node = torch.arange(num_nodes, device=sees.device)
    cells = (nodes - before) * nodes
    row = (cells.cumsum(0) - cells)[:, None] + (node - before[:, None]) * nodes[:, None]
    cell = row[:, :, None] + node
    is_row = (node >= before[:, None]) & (node < nodes[:, None])
    is_cell = is_row[:, :, None] & (node < nodes[:, None])[:, None, :]
    place = torch.where(is_cell, cell // 8, 0).flatten()
    # No two cells are the same bit, so sums of bits are unions of them.
    bit = torch.where(is_cell, 1 << cell % 8, 0).flatten()
    mask_bytes = mask_bytes[: -(-num_seqs * num_nodes * num_nodes // 8)]
    nothing = torch.zeros(len(mask_bytes), dtype=torch.int64, device=sees.device)
    own = nothing.index_add(0, place, bit)
    seen = nothing.index_add(0, place, torch.where(sees.flatten(), bit, 0))
    mask_bytes.copy_(mask_bytes & ~own | seen)


@as_launch
def device_inputs(slot: Tensor, given: GivenInputs, to: StepTensors) -> None:
    """Twin of launch_device_inputs. A recorder notes it as one launch, too."""
    num_seqs, num_ids, counts = int(slot[0]), len(given.token_ids), to.counts
    parts = slot_parts(num_seqs, num_ids)
    kv_bound, q_bound = slot[parts.kv_len].to(counts.device), slot[parts.q_len].to(counts.device)
    given_kv, given_q, begin, stored = (
        words[:num_seqs].to(counts.device) for words in (given.kv_len, given.q_len, given.first_writable, given.stored)
    )
    given_kv = given_kv + given.ahead
    new = given_q.clamp(min=0).minimum(q_bound)
    length = given_kv.maximum(new).minimum(kv_bound)
    cut = ((new != given_q) | (length != given_kv)).any()
    late = length - new > stored
    length = torch.where(late, stored + new, length)
    below = (new > 0) & (length - new < begin)
    length = torch.where(below, (begin + new).minimum(kv_bound), length)
    new = torch.where(below, new.minimum((length - begin).clamp(min=0)), new)
    to.kv_len[:num_seqs].copy_(torch.where(length > 0, length, to.pads.kv_len))
    to.q_len[:num_seqs].copy_(new)
    counts[1] = new.sum()
    counts[ERROR_WORD] = (
        torch.where(cut, LENGTH_BEYOND_BOUND, 0)
        | torch.where(late.any(), UNSTORED_TOKEN, 0)
        | torch.where(below.any(), SHARED_TOKEN, 0)
    )
    live = torch.arange(num_ids, device=counts.device) < counts[1]
    to.token_ids[:num_ids].copy_(torch.where(live, given.token_ids.to(counts.device), 0))
    to.token_ids[num_ids:].zero_()


def draft_steps(steps: Sequence[StepTensors], parents: Tensor, branches: int) -> None:
    """Twin of launch_draft_steps."""
    first = steps[0]
    live = torch.arange(len(first.kv_len), device=first.counts.device) < first.counts[0]
    for number, step in enumerate(steps):
        if step.mask_start.numel():
            step.mask_start.copy_(torch.where(live, first.kv_len - branches, 0))
        if number:
            step.kv_len.copy_(torch.where(live, first.kv_len + number * branches, first.pads.kv_len))
            step.token_ids.zero_()
    if parents.numel():
        draft = torch.arange(parents.shape[1], device=parents.device, dtype=torch.int32)
        parents.copy_(torch.where(draft < branches, NO_PARENT, draft - branches).expand_as(parents))


def table_update(updates: Tensor, table: Tensor, *, num_updates: int) -> None:
    """Twin of launch_table_update; runs outside of recordings."""
    row, column, entry = updates[: UPDATE_WORDS * num_updates].to(table.device).view(-1, UPDATE_WORDS).unbind(1)
    live = row > 0
    table[row[live].long(), column[live].long()] = entry[live]


def fill(step: StepTensors, *, page_size: int, window_left: int = ALL_KEYS, chunk: int = ALL_KEYS) -> None:
    """Twin of launch_fill."""
    first_token = _write_indptr(step.q_indptr, step.q_len)
    step.last_token_of_seq.copy_(torch.where(step.q_len > 0, step.q_indptr[1:] - 1, 0))
    _write_tokens(step, first_token, page_size, window_left, chunk)
    pages = (step.kv_len + page_size - 1) // page_size
    first_no = first_page_seen(step, page_size, window_left, chunk)
    if step.page_indptr.numel():
        _write_page_list(step, _write_indptr(step.page_indptr, pages), pages, first_no)
        step.last_page_len.copy_(torch.where(step.kv_len > 0, (step.kv_len - 1) % page_size + 1, 1))
    if step.block_table.numel():
        _write_block_table(step, pages, first_no)
    if step.kv_len_int64.numel():
        step.kv_len_int64.copy_(step.kv_len)
    if step.mask_indptr.numel():
        _write_indptr(step.mask_indptr, step.q_len.long() * (step.kv_len - step.mask_start))
    if step.group_indptr.numel():
        _write_groups(step, page_size)


def _write_indptr(indptr: Tensor, counts: Tensor) -> Tensor:
    """Writes indptr[i] = counts[0] + ... + counts[i-1]; returns it without its end, int64."""
    ends = torch.cumsum(counts, 0)
    indptr[:1].zero_()
    indptr[1:].copy_(ends)
    return ends - counts


def _write_tokens(step: StepTensors, first_token: Tensor, page_size: int, window_left: int, chunk: int) -> None:
    """Writes sequences, rows, positions, slots, and the error word of tokens that have no page or see none."""
    no_page = 0 if step.terms.null_page else -1
    num_seqs, num_tokens = step.kv_len.shape[0], step.slot_of_token.shape[0]
    token = torch.arange(num_tokens, device=step.counts.device)
    seq = torch.searchsorted(first_token + step.q_len, token, right=True)
    has_seq = seq < num_seqs
    live = (token < step.counts[1]) & has_seq
    seq = seq.clamp(max=num_seqs - 1)
    row = step.row_of_seq[seq]
    step.seq_of_token.copy_(seq)
    step.row_of_token.copy_(torch.where(has_seq, row, 0))
    kv_index = (step.kv_len - step.q_len - first_token)[seq] + token
    if step.pads.kv_len:
        kv_index = torch.where(row == 0, -1, kv_index)
    position = torch.where(live, kv_index.clamp(min=0), 0)
    page_no, has_key = position // page_size, live & (kv_index >= 0)
    page = torch.where(has_key, _pages_at(step, row, page_no, no_page), no_page)
    step.position_of_token.copy_(position)
    step.last_key_of_token.copy_(torch.where(has_key, kv_index, -1))
    step.slot_of_token.copy_(torch.where(page < 0, -1, page * page_size + position % page_size))
    is_lost = ((has_key if step.terms.short_kv else live) & (page <= no_page)).any()
    step.counts[ERROR_WORD].bitwise_or_(is_lost.to(torch.int32) * TOKEN_WITHOUT_PAGE)
    first_key = torch.maximum(position - window_left, position - position % chunk).clamp(min=0)
    first_page = _pages_at(step, row, first_key // page_size, no_page)
    is_blind = (has_key & (page_no < step.table.shape[1]) & (first_page <= no_page)).any()
    step.counts[ERROR_WORD].bitwise_or_(is_blind.to(torch.int32) * WINDOW_WITHOUT_PAGE)


def first_page_seen(step: StepTensors, page_size: int, window_left: int, chunk: int) -> Tensor:
    """int32 [S]: see fill_roles.py."""
    start = (step.kv_len - step.q_len).clamp(min=0)
    return torch.maximum(start - window_left, start - start % chunk) // page_size


def _write_page_list(step: StepTensors, first_entry: Tensor, pages: Tensor, first_no: Tensor) -> None:
    num_seqs = step.kv_len.shape[0]
    entry = torch.arange(step.page_list.shape[0], device=step.counts.device)
    seq = torch.searchsorted(first_entry + pages, entry, right=True)
    live = seq < num_seqs
    seq = seq.clamp(max=num_seqs - 1)
    page_no = torch.where(live, entry - first_entry[seq], 0)
    ahead, row = _page_to_read_ahead(step, pages), step.row_of_seq[seq]
    live &= page_no >= first_no[seq]
    if step.pads.kv_len:
        live &= row > 0
    step.page_list.copy_(torch.where(live, _pages_at(step, row, page_no, 0), ahead))


def _write_block_table(step: StepTensors, pages: Tensor, first_no: Tensor) -> None:
    width = min(step.block_table.shape[1], step.table.shape[1])
    page_no = torch.arange(width, device=step.counts.device)
    live = (page_no >= first_no[:, None]) & (page_no < pages[:, None])
    ahead = _page_to_read_ahead(step, pages)
    step.block_table[:, width:].copy_(ahead)
    step.block_table[:, :width].copy_(torch.where(live, step.table[step.row_of_seq.long(), :width], ahead))


def _page_to_read_ahead(step: StepTensors, pages: Tensor) -> Tensor:
    """int32 [1]: see fill_roles.py. pages: of each sequence"""
    if step.terms.null_page:
        return pages.new_zeros(1)
    has_kv = step.kv_len > 0
    if step.pads.kv_len:
        has_kv &= step.row_of_seq > 0
    last = torch.where(has_kv, torch.arange(len(pages), device=pages.device), 0).amax(0, keepdim=True)
    page_no = pages[last].clamp(max=step.table.shape[1]) - 1
    return torch.where(page_no < 0, 0, step.table[step.row_of_seq[last].long(), page_no.clamp(min=0).long()])


def _write_groups(step: StepTensors, page_size: int) -> None:
    num_seqs = step.counts[0]
    seq = torch.arange(len(step.kv_len), device=step.counts.device)
    live = seq < num_seqs
    end_before = torch.cat([torch.zeros_like(step.group_end[:1]), step.group_end[:-1]])
    first = torch.where(end_before == seq, seq, step.group_end)
    step.group_indptr[:-1].copy_(torch.where(live, first, num_seqs))
    step.group_indptr[-1:].copy_(num_seqs)
    shared = torch.where(live, step.prefix_len, 0)
    step.suffix_kv_len.copy_(torch.where(live, step.kv_len - shared, 0))
    step.suffix_page.copy_(shared // page_size)


def _pages_at(step: StepTensors, row: Tensor, page_no: Tensor, past_the_row: int) -> Tensor:
    """The page in each row, or past_the_row past the row's end."""
    width = step.table.shape[1]
    page = step.table[row.long(), page_no.clamp(max=width - 1)]
    return torch.where(page_no < width, page, past_the_row)
