"""The launches that read an engine's tensors: kernels and torch twins against plain Python."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rocm_attn.kernels.launch import repeated_launches
from rocm_attn.kernels.metadata import check_pages
from rocm_attn.kernels.metadata.check_pages import launch_check_pages
from rocm_attn.kernels.metadata.engine_tensors import (
    Q_BOUNDARIES,
    Q_EACH_ONE,
    Q_LENGTHS,
    EngineLengths,
    EngineRows,
    GatherSource,
    LengthBounds,
    PublishedLengths,
)
from rocm_attn.kernels.metadata.error_word import (
    LENGTH_BEYOND_BOUND,
    PAGE_NOT_IN_POOL,
    ROW_NOT_IN_TABLE,
    ROW_TWICE,
    SLOT_NOT_IN_TABLE,
    TOKEN_WITHOUT_PAGE,
    TOO_FEW_GIVEN,
)
from rocm_attn.kernels.metadata.gather_table import launch_gather_table
from rocm_attn.kernels.metadata.pack_mask import launch_pack_mask
from rocm_attn.kernels.metadata.publish_engine import launch_publish_engine
from rocm_attn.kernels.metadata.slot_layout import ECHO, ECHOED_STEP, NO_ECHO, WRONG_STEP
from rocm_attn.kernels.metadata.step_tensors import NO_PADS, Pads, StepTensors, TableTerms
from rocm_attn.kernels.metadata.take_slots import launch_take_slots
from rocm_attn.kernels.refs import engine_metadata as twins
from tests.amd.kernels.attention_cases import GARBAGE, garbage, ints

Launch = Callable[..., None]
publishes = pytest.mark.parametrize("publish", [launch_publish_engine, twins.publish_engine], ids=["kernel", "twin"])
gathers = pytest.mark.parametrize("gather", [launch_gather_table, twins.gather_table], ids=["kernel", "twin"])
checks = pytest.mark.parametrize("check", [launch_check_pages, twins.check_pages], ids=["kernel", "twin"])
takes = pytest.mark.parametrize("take", [launch_take_slots, twins.take_slots], ids=["kernel", "twin"])
packs = pytest.mark.parametrize("pack", [launch_pack_mask, twins.pack_mask], ids=["kernel", "twin"])
INT_TYPES = st.sampled_from([torch.int32, torch.int64])


def engines(values: Sequence[int], dtype: torch.dtype, stride: int, device: torch.device) -> Tensor:
    """Returns an engine-like tensor: of either type, a column of a larger one, with garbage between its elements."""
    memory = torch.full((max(1, len(values)), stride), GARBAGE, dtype=dtype)
    memory[: len(values), 0] = torch.tensor(values, dtype=dtype)
    return memory.to(device)[: len(values), 0]


def rows_of(num: int, device: torch.device) -> EngineRows:
    """Returns rows of a table to which no step has stored."""
    return EngineRows(num, torch.full((num,), -1, dtype=torch.int32, device=device))


@dataclass(frozen=True)
class Step:
    """An engine's inputs, and the padded sizes.

    seqs:      (row, kv_len, new tokens) of each entry
    row_pages: pages of each row of a table of lists; empty: a table of rows
    """

    seqs: list[tuple[int, int, int]]
    q_form: int
    causal: bool
    has_rows: bool
    gathered: bool
    row_pages: list[int]
    num_seqs_padded: int
    num_tokens_padded: int
    dtype: torch.dtype = torch.int32
    stride: int = 1
    min_q_len: int = 2
    max_q_len: int = 8
    num_cells: int = 0

    num_rows = 6
    page_size = 4
    kv_bound = 40


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Draws valid steps, and ones with invalid lengths and rows."""
    lengths = st.integers(0, 44) | st.sampled_from([-7, 2**31 - 1])
    news = st.integers(0, 9) | st.sampled_from([-3, 1000])
    rows = st.integers(0, 5) | st.sampled_from([-1, 6, 2**31 - 1])
    num_seqs = draw(st.integers(0, 6))
    seqs = [(draw(rows), draw(lengths), draw(news)) for _ in range(num_seqs)]
    lists = draw(st.lists(st.integers(0, 11), min_size=6, max_size=6)) if draw(st.booleans()) else []
    return Step(
        seqs,
        draw(st.sampled_from([Q_EACH_ONE, Q_LENGTHS, Q_BOUNDARIES])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        lists,
        max(1, num_seqs + draw(st.integers(0, 3))),
        draw(st.integers(num_seqs, 50)) or 1,
        draw(INT_TYPES),
        draw(st.sampled_from([1, 3])),
        *draw(st.sampled_from([(2, 8), (1, 1)])),
        draw(st.sampled_from([0, 50, 2**31 - 1])),
    )


@dataclass(frozen=True)
class Published:
    """The expected outputs."""

    counts: list[int]
    rows: list[int]
    own_rows: list[int]
    kv_len: list[int]
    q_len: list[int]
    keys_of_cells: list[int]


def by_hand(step: Step, pad_kv_len: int, pad_q_len: int) -> Published:
    """Computes the outputs one sequence after the other."""
    error, end, cells, live, live_tokens, left_out = 0, 0, 0, 0, 0, False
    rows, own_rows, kept_lengths, news, keys = [], [], [], [], []
    stored: set[int] = set()
    each_one, most = step.q_form == Q_EACH_ONE, 1 if step.q_form == Q_EACH_ONE else step.max_q_len
    for seq, (row, length, new) in enumerate(step.seqs):
        row = row if step.has_rows else seq
        is_row = 0 <= row < step.num_rows
        bound = min(step.kv_bound, step.row_pages[row] * 4) if step.row_pages and is_row else step.kv_bound
        wanted, begin = 1 if each_one else new, end
        if step.q_form == Q_BOUNDARIES:
            boundary = sum(given for _, _, given in step.seqs[: seq + 1])
            end = max(end, boundary) if boundary <= step.num_tokens_padded else end
        else:
            end = min(end + max(wanted, 0), step.num_tokens_padded)
        cells += (end - begin) * max(length, 0)
        fits = 0 <= length <= bound and end - begin == wanted <= most and not cells > (step.num_cells or cells)
        fits = fits and (each_one or not step.causal or wanted <= length)
        has_kv = is_row and (length > 0 or (not step.causal and not each_one and wanted > 0))
        left_out |= not each_one and is_row and not has_kv and wanted != 0
        if not is_row:
            error |= ROW_NOT_IN_TABLE
        elif not 0 <= length <= bound or (has_kv and (not fits or 0 < wanted < (1 if each_one else step.min_q_len))):
            error |= LENGTH_BEYOND_BOUND
        is_live = has_kv and fits
        if is_live:
            live, live_tokens = seq + 1, end
            error |= LENGTH_BEYOND_BOUND if left_out else 0
        if is_live and length > 0 and wanted > 0 and step.has_rows:
            error |= ROW_TWICE if row in stored else 0
            stored.add(row)
        rows.append(row if is_live else 0)
        own_rows.append((seq + 1 if step.gathered else row) if is_live else 0)
        kept_lengths.append(length if is_live else max(pad_kv_len, min(end - begin, step.kv_bound)))
        news.append(end - begin)
        keys.append(0 if cells > step.num_cells else max(length, 0))
    pads = step.num_seqs_padded - len(rows)
    return Published(
        [live, live_tokens, 41, error],
        rows + [0] * pads,
        own_rows + [0] * pads,
        kept_lengths + [pad_kv_len] * pads,
        news + [pad_q_len] * pads,
        keys + [0] * pads if step.num_cells else [GARBAGE] * step.num_seqs_padded,
    )


def published(publish: Launch, step: Step, device: torch.device, boundary: int = 0) -> tuple[Published, Tensor]:
    """Returns a launch's outputs, and the slot. boundary: start of the first sequence's new tokens"""
    rows, kv_len, new = ([seq[at] for seq in step.seqs] for at in range(3))
    if step.q_form == Q_BOUNDARIES:
        new = [boundary + sum(new[:at]) for at in range(len(new) + 1)]
    csr = [sum(step.row_pages[:at]) for at in range(step.num_rows + 1)]

    def tensor(values: list[int]) -> Tensor:
        return engines(values, step.dtype, step.stride, device)

    lengths = EngineLengths(
        tensor(kv_len),
        tensor(rows) if step.has_rows else None,
        None if step.q_form == Q_EACH_ONE else tensor(new),
        step.q_form,
    )
    words = [len(step.seqs), GARBAGE, 41, GARBAGE, 40, NO_ECHO, GARBAGE, GARBAGE]
    slot = torch.tensor(words, dtype=torch.int32, pin_memory=device.type == "cuda")
    counts = ints([GARBAGE, GARBAGE, 40, TOKEN_WITHOUT_PAGE], device)
    outputs = [garbage(step.num_seqs_padded + 9, device=device) for _ in range(5)]
    engine_row, row_of_seq, kept, taken, keys = (output[: step.num_seqs_padded] for output in outputs)
    least, most = (1, 1) if step.q_form == Q_EACH_ONE else (step.min_q_len, step.max_q_len)
    sizes = least, most, step.num_tokens_padded, step.page_size
    lists = tensor(csr) if step.row_pages else None
    rows_of_table = replace(rows_of(step.num_rows, device), csr_indptr=lists)
    bounds = LengthBounds(rows_of_table, step.kv_bound, *sizes, step.causal, step.num_cells)
    pad_q_len = int(step.q_form == Q_EACH_ONE)
    to = PublishedLengths(counts, engine_row, row_of_seq, kept, taken, keys, 2, pad_q_len, step.gathered)
    publish(slot, counts, lengths, bounds, to)
    assert all((output[step.num_seqs_padded :] == GARBAGE).all() for output in outputs)
    found = Published(*(x.tolist() for x in (counts, engine_row, row_of_seq, kept, taken, keys)))
    return found, slot


@pytest.mark.fast(1)
@publishes
@settings(max_examples=30)
@given(step=steps())
@example(step=Step([(2, 9, 3), (4, 7, 2)], Q_LENGTHS, True, True, False, [], 4, 9, stride=3))
@example(step=Step([(2, 0, 3), (2, 7, 2), (2, 0, 2)], Q_LENGTHS, False, True, False, [], 4, 9))
def test_an_engines_lengths_are_published_within_their_bounds(
    publish: Launch, kernel_device: torch.device, step: Step
) -> None:
    found, slot = published(publish, step, kernel_device)
    wanted = by_hand(step, 2, int(step.q_form == Q_EACH_ONE))
    assert found == wanted
    assert slot[ECHO] == TOKEN_WITHOUT_PAGE
    assert slot[ECHOED_STEP] == 40
    # For any input, tokens stay within the step, and pages within the row.
    assert sum(found.q_len[: len(step.seqs)]) <= step.num_tokens_padded
    assert max(found.kv_len) <= max(step.kv_bound, 2)


@publishes
@pytest.mark.parametrize(("num_seqs", "error"), [(0, 0), (2, LENGTH_BEYOND_BOUND)])
def test_boundaries_begin_at_zero(publish: Launch, num_seqs: int, error: int, kernel_device: torch.device) -> None:
    step = Step([(1, 9, 3), (2, 9, 4)][:num_seqs], Q_BOUNDARIES, True, True, False, [], 4, 9)
    found, _ = published(publish, step, kernel_device, boundary=1)
    assert found.counts == [num_seqs, 8 if num_seqs else 0, 41, error]
    assert found.q_len[:num_seqs] == [4, 4][:num_seqs]
    assert found.kv_len[:num_seqs] == [4, 9][:num_seqs]


@publishes
def test_a_wrong_boundary_moves_no_other_one(publish: Launch, kernel_device: torch.device) -> None:
    """One of three sequences before and after it, in the step or not; more than the program reads in one step."""
    num_seqs, wrong = 1100, 700
    boundaries = torch.arange(num_seqs + 1, device=kernel_device) * 3
    of_seq = [garbage(num_seqs, device=kernel_device) for _ in range(6)]
    counts, kv_len, row = (ints(each, kernel_device) for each in ([0] * 4, [9] * num_seqs, range(num_seqs)))
    to = PublishedLengths(counts, of_seq[0], of_seq[1], of_seq[2], of_seq[3], of_seq[4], 0, 0, gathered=False)
    bounds = LengthBounds(rows_of(num_seqs, kernel_device), 100, 0, 9, 3 * num_seqs, 1, causal=True)
    for step, value in enumerate([-1, 2 * wrong, 3 * num_seqs + 1, 2**31 - 1]):
        boundaries[wrong] = value
        words = [num_seqs, 0, step + 1, 0, step, NO_ECHO, 0, 0]
        slot = torch.tensor(words, dtype=torch.int32, pin_memory=kernel_device.type == "cuda")
        publish(slot, counts, EngineLengths(kv_len, row, boundaries, Q_BOUNDARIES), bounds, to)
        lost = [wrong - 1, wrong]
        assert counts.tolist() == [num_seqs, 3 * num_seqs, step + 1, LENGTH_BEYOND_BOUND]
        assert (to.kv_len == 0).nonzero().flatten().tolist() == lost
        ends = to.q_len.cumsum(0).tolist()
        assert [seq for seq, end in enumerate(ends) if end != 3 * seq + 3] == lost[:1]


@publishes
def test_many_sequences_of_an_engine_are_published_whole(publish: Launch, kernel_device: torch.device) -> None:
    """More sequences than the program reads in one step; the sum of their new tokens exceeds 32 bits."""
    num_seqs = 1100
    kv_len = torch.arange(num_seqs, device=kernel_device) % 7 + 3
    new = torch.arange(num_seqs, device=kernel_device) % 3
    counts = torch.zeros(4, dtype=torch.int32, device=kernel_device)
    of_seq = [garbage(num_seqs + 5, device=kernel_device) for _ in range(5)]
    to = PublishedLengths(counts, of_seq[0], of_seq[1], of_seq[2], of_seq[3], of_seq[4], 0, 0, gathered=False)
    slot = torch.tensor(
        [num_seqs, 0, 2, 0, 1, NO_ECHO, 0, 0], dtype=torch.int32, pin_memory=kernel_device.type == "cuda"
    )
    lengths = EngineLengths(kv_len, None, new, Q_LENGTHS)
    publish(
        slot, to.counts, lengths, LengthBounds(rows_of(num_seqs, kernel_device), 100, 0, 9, 2000, 1, causal=True), to
    )
    assert to.counts.tolist() == [num_seqs, int(new.sum()), 2, 0]
    assert slot[ECHO] == WRONG_STEP  # read after the line above has waited for the device
    assert torch.equal(to.q_len[:num_seqs].long(), new)
    assert torch.equal(to.kv_len[:num_seqs].long(), kv_len)
    huge = EngineLengths(kv_len, None, torch.full_like(new, 2**31 - 1), Q_LENGTHS)
    publish(
        slot,
        to.counts,
        huge,
        LengthBounds(rows_of(num_seqs, kernel_device), 100, 0, 2**31 - 1, 2000, 1, causal=False),
        to,
    )
    assert to.counts.tolist() == [0, 0, 2, LENGTH_BEYOND_BOUND]
    assert int(to.q_len[:num_seqs].sum()) == 2000


@dataclass(frozen=True)
class Table:
    """An engine's table and the sequences of a step: (row, kv_len) of each."""

    rows: list[list[int]]
    seqs: list[tuple[int, int]]
    has_slots: bool
    is_csr: bool
    slot_map: list[int]
    page_size: int
    width: int


@st.composite
def tables(draw: st.DrawFn) -> Table:
    page_size, width = draw(st.sampled_from([1, 3, 4])), draw(st.integers(1, 6))
    is_csr = draw(st.booleans())
    has_slots = not is_csr and draw(st.booleans())
    per_row = width * page_size if has_slots else width
    entries = st.integers(0, 60) | st.just(-1)
    num_rows = draw(st.integers(1, 4))
    rows = [draw(st.lists(entries, min_size=1 if is_csr else per_row, max_size=per_row)) for _ in range(num_rows)]
    seqs = draw(
        st.lists(st.tuples(st.integers(0, num_rows - 1), st.integers(0, 8 * page_size)), min_size=1, max_size=5)
    )
    slot_map = draw(st.lists(st.integers(-1, 90), min_size=1, max_size=50)) if draw(st.booleans()) else []
    return Table(rows, seqs, has_slots, is_csr, slot_map, page_size, width + 1)


@pytest.mark.fast(1)
@gathers
@settings(max_examples=30)
@given(case=tables(), dtype=INT_TYPES, stride=st.sampled_from([1, 2]))
def test_tables_of_any_kind_become_one_of_pages(
    gather: Launch, kernel_device: torch.device, case: Table, dtype: torch.dtype, stride: int
) -> None:
    num_seqs, size = len(case.seqs), case.page_size
    out = torch.full((num_seqs + 2, case.width + 3), GARBAGE, dtype=torch.int32)[:, : case.width]
    wanted = out.tolist()
    for seq, (row, kv_len) in enumerate(case.seqs):
        for page_no in range(min(-(-kv_len // size), case.width)):
            column = page_no * size if case.has_slots else page_no
            entry = case.rows[row][column] if column < len(case.rows[row]) else -1
            if case.slot_map:
                slot = entry if case.has_slots else entry * size
                entry = case.slot_map[slot] if 0 <= slot < len(case.slot_map) else -1
            page = entry // (size if case.has_slots or case.slot_map else 1)
            wanted[seq + 1][page_no] = page if entry >= 0 else -1
    flat = [entry for row in case.rows for entry in row]
    entries = engines(flat, dtype, stride, kernel_device)
    sizes = (len(case.rows), len(case.rows[0]))
    csr = [sum(map(len, case.rows[:at])) for at in range(len(case.rows) + 1)]
    source = GatherSource(
        entries if case.is_csr else entries.as_strided(sizes, (sizes[1] * stride, stride)),
        case.has_slots,
        engines(csr, dtype, stride, kernel_device) if case.is_csr else None,
        engines(case.slot_map, dtype, stride, kernel_device) if case.slot_map else None,
    )
    of_seq = [ints([seq[at] for seq in case.seqs], kernel_device) for at in (0, 1)]
    table = out.to(kernel_device) if kernel_device.type == "cuda" else out
    for _ in range(2):
        gather(source, *of_seq, table, page_size=size)
    assert table.tolist() == wanted


@gathers
def test_long_rows_are_gathered_whole(gather: Launch, kernel_device: torch.device) -> None:
    """Several programs share more pages than one takes at once."""
    entries = torch.randperm(3 * 5000).view(3, 5000).to(kernel_device)
    table = torch.zeros(3, 4500, dtype=torch.int32, device=kernel_device)
    of_seq = [ints(values, kernel_device) for values in ([2, 0], [4400, 17])]
    gather(GatherSource(entries), *of_seq, table, page_size=1)
    assert torch.equal(table[1, :4400].long(), entries[2, :4400])
    assert torch.equal(table[2, :17].long(), entries[0, :17])
    assert not table[0].any()
    assert not table[1, 4400:].any()
    assert not table[2, 17:].any()


@gathers
@pytest.mark.parametrize("has_slots", [False, True])
def test_an_entry_past_int32_is_no_page(gather: Launch, has_slots: bool, kernel_device: torch.device) -> None:
    """Truncated to 32 bits it would be another sequence's page."""
    entries = torch.tensor([[2**32 + 5, 2**31, 2**31 - 1, -(2**31)]], device=kernel_device)
    table = torch.zeros(2, 4, dtype=torch.int32, device=kernel_device)
    of_seq = [ints([value], kernel_device) for value in (0, 4)]
    gather(GatherSource(entries, has_slots), *of_seq, table, page_size=1)
    assert table.tolist() == [[0] * 4, [-1, -1, 2**31 - 1, -1]]


@gathers
def test_a_list_that_begins_before_all_lists_has_no_page_there(gather: Launch, kernel_device: torch.device) -> None:
    lists = torch.tensor([[-2, 3], [8, 9]], device=kernel_device)
    table = torch.zeros(3, 5, dtype=torch.int32, device=kernel_device)
    of_seq = [ints(values, kernel_device) for values in ([0, 2], [9, 2])]
    source = GatherSource(lists.flatten(), csr_indptr=torch.tensor([-2, 3, 3, 5], device=kernel_device))
    gather(source, *of_seq, table, page_size=2)
    assert table[1:].tolist() == [[-1, -1, -1, 3, 8], [9, 0, 0, 0, 0]]


def step_over(
    table: list[list[int]], lengths: Sequence[tuple[int, int]], device: torch.device, pads: Pads = NO_PADS
) -> StepTensors:
    """Returns a published step: sequence i has row i + 1 of the table, and the given (kv_len, q_len); then a pad."""
    values = {
        "counts": [len(lengths), sum(new for _, new in lengths), 41, TOKEN_WITHOUT_PAGE],
        "row_of_seq": [*range(1, len(lengths) + 1), 0],
        "kv_len": [*(length for length, _ in lengths), pads.kv_len],
        "q_len": [*(new for _, new in lengths), pads.q_len],
        "table": [[GARBAGE] * len(table[0]), *table],
    }
    tensors = {name: ints(value, device) for name, value in values.items()}
    return StepTensors.of(garbage(0, device=device), pads, **tensors)


@checks
@pytest.mark.parametrize(("wrong", "num_pages"), [(-1, 40), (40, 40), (2**31 - 1, 40), (7, 7), (0, 0)])
@pytest.mark.parametrize("page_no", [1, 2])
def test_a_sequence_whose_page_does_not_exist_becomes_a_pad(
    check: Launch, wrong: int, num_pages: int, page_no: int, kernel_device: torch.device
) -> None:
    """With three tokens per page, the window's first key is in page 1, the last one in page 2; row 1 is right."""
    table = [[GARBAGE, 0, 6, GARBAGE], [GARBAGE, 2, 3, GARBAGE]]
    if num_pages:
        table[1][page_no] = wrong
    step = step_over(table, [(8, 2), (9, 1)], kernel_device, Pads(1, 0))
    for _ in range(2):
        check(step, ints([num_pages], kernel_device), page_size=3, window_left=3, spans_pass=False)
    is_right = num_pages > 6
    assert step.row_of_seq.tolist() == [int(is_right), 0, 0]
    assert step.kv_len.tolist() == [8 if is_right else 2, 1, 1]
    assert step.q_len.tolist() == [2, 1, 0]
    assert step.counts.tolist() == [2, 3, 41, TOKEN_WITHOUT_PAGE | PAGE_NOT_IN_POOL]


@checks
@pytest.mark.parametrize("window_left", [3, 2**31 - 1])
def test_pages_that_exist_and_those_that_no_token_sees_are_left_alone(
    check: Launch, window_left: int, kernel_device: torch.device
) -> None:
    """Short KV is included. Pages before a window were freed, and there are none after the KV."""
    before = -1 if window_left == 3 else 5
    step = step_over([[before, 0, 6, -1], [39, -1, -1, -1], [-1] * 4], [(8, 2), (1, 4), (0, 3)], kernel_device)
    published = [step.row_of_seq.tolist(), step.kv_len.tolist(), step.counts.tolist()]
    check(step, ints([40], kernel_device), page_size=3, window_left=window_left, spans_pass=False)
    assert [step.row_of_seq.tolist(), step.kv_len.tolist(), step.counts.tolist()] == published


@checks
@pytest.mark.parametrize(("page", "is_right"), [(0, True), (1, True), (2, False), (3, False)])
def test_pages_before_the_chunk_of_the_first_new_token_are_left_alone(
    check: Launch, page: int, is_right: bool, kernel_device: torch.device
) -> None:
    """New tokens are 8 and 9 of chunks of four, which begin in page 2; the window of the first begins in page 1."""
    row = [5, 6, 7, 8]
    row[page] = -1
    step = step_over([row], [(10, 2)], kernel_device, Pads(1, 0))
    check(step, ints([40], kernel_device), page_size=3, window_left=3, spans_pass=False, chunk=4)
    assert step.kv_len.tolist()[0] == (10 if is_right else 2)


@checks
def test_one_wrong_page_of_a_long_row_is_found(check: Launch, kernel_device: torch.device) -> None:
    """Several programs share more pages than one takes at once."""
    table = torch.arange(3 * 5000).view(3, 5000)
    table[1, 4321] = 2**30
    step = step_over(table.tolist(), [(5000, 1), (5000, 1), (4321, 1)], kernel_device)
    num_pages = ints([15_000], kernel_device)
    check(step, num_pages, page_size=1, window_left=2**31 - 1, spans_pass=False)
    assert step.kv_len.tolist() == [5000, 0, 4321, 0]
    assert step.row_of_seq.tolist() == [1, 0, 3, 0]


@checks
@pytest.mark.parametrize(
    ("begin", "page", "null_page", "is_right"),
    [
        (5, -1, True, False),
        (5, 40, True, False),
        (5, 0, True, False),
        (5, 0, False, True),
        (5, 39, True, True),
        (6, -1, True, True),
        (6, 0, True, True),
        (-9, 39, True, False),
        (11, 0, True, True),
    ],
)
def test_a_span_that_passes_the_window_needs_its_pages(
    check: Launch, begin: int, page: int, null_page: bool, is_right: bool, kernel_device: torch.device
) -> None:
    """The window's first key is 9, in page 3, and page 1 of row 1 is that page; row 2 has a span within its window.

    A page 0 within the window is left to fill, which reports it.
    """
    table = [[-1, page, 6, 0, 8], [-1, -1, 7, 9, 39]]
    step = step_over(table, [(14, 2), (14, 2)], kernel_device, Pads(1, 0))
    ends = [13 if begin < 12 else 0, 0, 0, 14]
    spans = [ints(values, kernel_device) for values in ([begin, 0, 0, 13], ends)]
    num_pages = ints([40], kernel_device)
    step = replace(step, span_begin=spans[0], span_end=spans[1], terms=TableTerms(null_page=null_page))
    for _ in range(2):
        check(step, num_pages, page_size=3, window_left=3, spans_pass=True)
    assert step.row_of_seq.tolist() == [int(is_right), 2, 0]
    assert step.kv_len.tolist() == [14 if is_right else 2, 14, 1]
    assert step.counts.tolist() == [2, 4, 41, TOKEN_WITHOUT_PAGE | (0 if is_right else PAGE_NOT_IN_POOL)]


@checks
def test_the_span_of_one_token_of_a_long_step_is_found(
    check: Launch, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more sequences before it, and more tokens of its own, than one program takes at once."""
    monkeypatch.setattr(check_pages, "_PAGES_AT_ONCE", 16)
    monkeypatch.setattr(check_pages, "_variant", repeated_launches(check_pages._check_pages_kernel))
    table = torch.ones(21, 60, dtype=torch.int64)
    table[20, 20] = -1
    step = step_over(table.tolist(), [(1, 1)] * 20 + [(60, 35)], kernel_device)
    for at, is_right in ((20 + 33, True), (20 + 34, False)):
        begin = torch.zeros(20 + 35, dtype=torch.int32, device=kernel_device)
        end = torch.zeros_like(begin)
        begin[at], end[at] = 21 if is_right else 20, 60
        num_pages = ints([2], kernel_device)
        spans = replace(step, span_begin=begin, span_end=end)
        check(spans, num_pages, page_size=1, window_left=3, spans_pass=True)
        assert step.kv_len.tolist() == [1] * 20 + [60 if is_right else 0, 0]


@publishes
def test_a_row_that_two_sequences_store_in_is_reported(publish: Launch, kernel_device: torch.device) -> None:
    """A sequence without a new token stores nothing; the same rows are right in the next step."""
    rows = rows_of(700, kernel_device)
    for step, (first, last, new) in enumerate([(0, 650, 2), (650, 650, 2), (650, 650, 0), (0, 650, 2)]):
        chosen = torch.arange(600, device=kernel_device)
        chosen[0], chosen[599] = first, last
        news = torch.full((600,), 2, device=kernel_device)
        news[599] = new
        outputs = [garbage(600, device=kernel_device) for _ in range(5)]
        counts = torch.zeros(4, dtype=torch.int32, device=kernel_device)
        to = PublishedLengths(counts, outputs[0], outputs[1], outputs[2], outputs[3], outputs[4], 0, 0, gathered=False)
        words = [600, 0, step + 1, 0, step, NO_ECHO, 0, 0]
        slot = torch.tensor(words, dtype=torch.int32, pin_memory=kernel_device.type == "cuda")
        lengths = EngineLengths(news + 7, chosen, news, Q_LENGTHS)
        publish(slot, counts, lengths, LengthBounds(rows, 100, 0, 9, 2000, 1, causal=True), to)
        assert counts.tolist() == [600, 1198 + new, step + 1, ROW_TWICE if step == 1 else 0]


@pytest.mark.fast(1)
@takes
@settings(max_examples=30)
@given(data=st.data(), dtype=INT_TYPES, stride=st.sampled_from([1, 3]), null_page=st.booleans(), has_map=st.booleans())
def test_a_slot_that_the_table_does_not_give_is_dropped_and_reported(
    take: Launch,
    kernel_device: torch.device,
    data: st.DataObject,
    dtype: torch.dtype,
    stride: int,
    null_page: bool,
    has_map: bool,
) -> None:
    page_size, num_padded = 4, data.draw(st.integers(1, 9))
    wanted = data.draw(st.lists(st.integers(0, 30), min_size=num_padded, max_size=num_padded))
    slots = st.integers(-2, 31) | st.sampled_from([40, 2**31 - 1])
    given_slots = [data.draw(st.just(slot) | slots) for slot in wanted][: data.draw(st.integers(1, num_padded))]
    num_tokens = data.draw(st.integers(0, num_padded))
    slot_map = data.draw(st.permutations(range(31))) if has_map else []
    kept, error = [], 16 | (TOO_FEW_GIVEN if len(given_slots) < num_tokens else 0)
    for token in range(num_padded):
        slot = given_slots[token] if token < min(len(given_slots), num_tokens) else -1
        if has_map and slot >= 0:
            slot = slot_map[slot] if slot < len(slot_map) else 1 << 40
        is_same = slot == wanted[token]
        kept.append(slot if is_same else 0 if null_page else -1)
        if not is_same and slot >= (page_size if null_page else 0):
            error |= SLOT_NOT_IN_TABLE
    counts = ints([1, num_tokens, 41, 16], kernel_device)
    memory = garbage(num_padded + 300, device=kernel_device)
    memory[:num_padded] = torch.tensor(wanted, device=kernel_device)
    to = StepTensors.of(
        memory[:0], NO_PADS, TableTerms(null_page=null_page), counts=counts, slot_of_token=memory[:num_padded]
    )
    take(
        engines(given_slots, dtype, stride, kernel_device),
        engines(slot_map, dtype, stride, kernel_device) if has_map else None,
        to,
        page_size=page_size,
    )
    assert memory[:num_padded].tolist() == kept
    assert (memory[num_padded:] == GARBAGE).all()
    assert counts.tolist() == [1, num_tokens, 41, error]


@pytest.mark.fast
@packs
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("num_cells", "num_given"), [(0, 9), (1, 9), (13, 20), (16, 16), (41, 30), (20_011, 20_013), (77, 1)]
)
def test_cells_of_a_byte_become_bits_in_order(
    pack: Launch, num_cells: int, num_given: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(num_cells)
    cells = torch.rand(num_given, generator=generator) < 0.5
    words = torch.full((max(num_cells, num_given) // 32 + 3,), GARBAGE, dtype=torch.int32, device=kernel_device)
    before = words.clone().view(torch.uint8).tolist()
    positions = engines([5, 6, 9, 7], dtype, 3, kernel_device)
    position_of_token = garbage(6, device=kernel_device)
    counts = ints([2, 3, 41, 0], kernel_device)
    indptr = torch.tensor([0, num_cells // 2, num_cells], device=kernel_device)
    kv_len, q_len, seq_of_token = (ints(values, kernel_device) for values in ([7, 8], [1, 2], [0, 1, 1, 1, 1, 1]))
    window_start = garbage(6, device=kernel_device)
    step = StepTensors.of(
        counts[:0],
        counts=counts,
        kv_len=kv_len,
        q_len=q_len,
        seq_of_token=seq_of_token,
        mask_indptr=indptr,
        mask_words=words,
        mask_positions=position_of_token,
        window_start=window_start,
    )
    pack(cells.to(kernel_device), positions, window_left=4, to=step)
    bits = [
        int(cell < num_given and cells[cell]) if cell < num_cells else 0 for cell in range(-(-num_cells // 32) * 32)
    ]
    packed = [sum(bits[8 * at + bit] << bit for bit in range(8)) for at in range(len(bits) // 8)]
    assert words.view(torch.uint8).tolist() == packed + before[len(packed) :]
    assert position_of_token.tolist() == [5, 6, 9, 0, 0, 0]
    assert window_start.tolist() == [2, 2, 5, 0, 0, 0], "from the place of the sequence's first new token at least"
    assert counts.tolist() == [2, 3, 41, TOO_FEW_GIVEN if num_cells > num_given else 0]
