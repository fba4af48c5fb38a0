"""Checks of the masks of the kernels that make a step's tensors on the device."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rocm_attn.kernels.attention.scores import Visibility
from rocm_attn.kernels.metadata.check_pages import launch_check_pages
from rocm_attn.kernels.metadata.chunk_starts import launch_chunk_starts
from rocm_attn.kernels.metadata.device_inputs import launch_device_inputs
from rocm_attn.kernels.metadata.draft_steps import launch_draft_steps
from rocm_attn.kernels.metadata.engine_tensors import (
    Q_BOUNDARIES,
    Q_LENGTHS,
    EngineLengths,
    EngineRows,
    GatherSource,
    LengthBounds,
    PublishedLengths,
)
from rocm_attn.kernels.metadata.fill import launch_fill
from rocm_attn.kernels.metadata.gather_table import launch_gather_table
from rocm_attn.kernels.metadata.given_inputs import GivenInputs
from rocm_attn.kernels.metadata.pack_mask import launch_pack_mask
from rocm_attn.kernels.metadata.page_watch import PageWatch
from rocm_attn.kernels.metadata.place_mask import launch_place_mask
from rocm_attn.kernels.metadata.place_spans import launch_place_spans
from rocm_attn.kernels.metadata.place_trees import launch_place_trees
from rocm_attn.kernels.metadata.publish import launch_publish
from rocm_attn.kernels.metadata.publish_engine import launch_publish_engine
from rocm_attn.kernels.metadata.slot_layout import TAKEN_BY_GRAPH
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS, NO_PADS, Pads, StepTensors, TableTerms
from rocm_attn.kernels.metadata.table_update import launch_table_update
from rocm_attn.kernels.metadata.take_inputs import launch_take_inputs
from rocm_attn.kernels.metadata.take_slots import launch_take_slots
from rocm_attn.kernels.metadata.visible_ranges import launch_visible_ranges
from rocm_attn.kernels.metadata.watch_pages import launch_watch_pages
from rocm_attn.kernels.refs import engine_metadata, page_watch
from rocm_attn.kernels.refs import metadata as twins
from rocm_attn.problem import UNLIMITED_WINDOW
from tests.amd.kernels.draft_rounds import of_draft_steps
from tests.amd.mutation.arguments import assert_same
from tests.amd.mutation.memory import PAGE_SIZE, Memory, garbage, ints

NOTHING = ints([])


def fill(memory: Memory) -> None:
    """Checks five sequences and padded tokens, first with a page for every token.

    Then checks values that only a device can give: a length past its row, more new tokens than tokens, a list too short
    for its pages.
    """
    table = ints(range(1, 13)).view(4, 3)
    right, wrong = ([4, 7, 0, 9, 2], [4, 0, 0, 3, 2]), ([4, 7, 0, 11, 2], [4, 0, 0, 3, 4])
    # The window of a token past the last row begins past it too.
    for (kv_len, q_len), num_tokens, num_tokens_padded, list_len, (window_left, chunk) in (
        (right, 9, 13, 12, (ALL_KEYS, ALL_KEYS)),
        (wrong, 9, 9, 7, (1, 4)),
    ):
        step = StepTensors.of(
            NOTHING,
            counts=ints([5, num_tokens, 1, 0]),
            row_of_seq=ints([2, 1, 3, 3, 2]),
            kv_len=ints(kv_len),
            q_len=ints(q_len),
            table=table,
            prefix_len=ints([3, 3, 0, 6, 0]),
            group_end=ints([2, 2, 3, 5, 5]),
            mask_start=ints([0, 3, 0, 1, 0]),
            q_indptr=garbage(6),
            last_token_of_seq=garbage(5),
            seq_of_token=garbage(num_tokens_padded),
            row_of_token=garbage(num_tokens_padded),
            position_of_token=garbage(num_tokens_padded),
            last_key_of_token=garbage(num_tokens_padded),
            slot_of_token=garbage(num_tokens_padded),
            page_indptr=garbage(6),
            page_list=garbage(list_len),
            last_page_len=garbage(5),
            block_table=garbage(25).view(5, 5),
            kv_len_int64=garbage(5).long(),
            mask_indptr=garbage(6).long(),
            group_indptr=garbage(6),
            suffix_kv_len=garbage(5),
            suffix_page=garbage(5),
        )
        lengths = {"page_size": PAGE_SIZE, "window_left": window_left, "chunk": chunk}
        assert_same(memory, launch_fill, twins.fill, step, **lengths)
        pads = replace(step, pads=Pads(1), row_of_seq=ints([2, 0, 3, 3, 2]))  # the second sequence is one
        for each in (pads, replace(pads, terms=TableTerms(null_page=False))):
            assert_same(memory, launch_fill, twins.fill, each, **lengths)


def published() -> StepTensors:
    """A step of five sequences and seven tokens, which nothing was written to."""
    names = ("row_of_seq", "kv_len", "q_len", "prefix_len", "group_end")
    of_seqs = {name: garbage(5) for name in names}
    return StepTensors.of(NOTHING, Pads(5, 0), counts=garbage(4), token_ids=garbage(7), **of_seqs)


def publish(memory: Memory) -> None:
    """Checks two sequences of three tokens at five and seven, with token ids and without; the slot is written too."""
    for has_ids in (1, 0):
        slot = ints([2, 3, 9, has_ids, 8, -1, -1, 0, 4, 5, 30, 40, 1, 2, *[11, 12, 13] * has_ids, 16, 32, 1, 2])
        assert_same(memory, launch_publish, twins.publish, slot, ints([6, 6, 8, 2]), to=published())


def masked(lengths: Sequence[Tensor], num_words: int, num_tokens: int, **more: Tensor) -> StepTensors:
    """A step with room for a mask's words, and for positions of tokens. lengths: counts, kv_len and q_len"""
    given = dict(zip(("counts", "kv_len", "q_len"), lengths, strict=True))
    return StepTensors.of(NOTHING, mask_words=garbage(num_words), mask_positions=garbage(num_tokens), **given, **more)


def place_mask(memory: Memory) -> None:
    """Checks seven bytes for words that hold more, positions of three tokens at five; three sequences, one a pad."""
    bits, positions = torch.arange(1, 8, dtype=torch.uint8), ints([4, 5, 6, 7])
    for keys_before in (0, 3, ALL_KEYS):
        of_tokens = {"mask_start": garbage(3), "window_start": garbage(5)}
        step = masked([ints([2, 3, 1, 0]), ints([9, 2, 0]), ints([2, 1, 0])], 2, 5, **of_tokens)
        options = {"keys_before": keys_before, "window_left": 4}
        assert_same(memory, launch_place_mask, twins.place_mask, bits, positions, **options, to=step)


def table_update(memory: Memory) -> None:
    """Checks three cells, one of them in the reserved row."""
    updates, table = ints([1, 0, 7, 0, 1, 8, 2, 3, 9]), garbage(12).view(3, 4)
    assert_same(memory, launch_table_update, twins.table_update, updates, table, num_updates=3)


def publish_engine(memory: Memory) -> None:
    """Checks three entries at five, in rows of lists; the slot is written too. Then checks no entries at all."""
    sizes = {"kv_len": 30, "min_q_len": 0, "max_q_len": 9, "num_tokens": 7, "page_size": 3, "num_cells": 40}
    for num_seqs, q_form, new in ((3, Q_LENGTHS, [2, 3, 1]), (3, Q_BOUNDARIES, [0, 2, 5, 6]), (0, Q_BOUNDARIES, [7])):
        slot = ints([num_seqs, 3, 9, 0, 8, -1, -1, 0])
        # The last row is past the table.
        lengths = EngineLengths(ints([9, 40, 1]), ints([2, 0, 40]), ints(new), q_form)
        bounds = LengthBounds(EngineRows(3, garbage(3), ints([0, 3, 6, 9])), **sizes, causal=True)
        of_seqs = garbage(4), garbage(5), garbage(5), garbage(5), garbage(5), garbage(5)
        to = PublishedLengths(*of_seqs, pad_kv_len=5, pad_q_len=0, gathered=True)
        given = slot, ints([6, 6, 8, 2]), lengths, bounds, to
        assert_same(memory, launch_publish_engine, engine_metadata.publish_engine, *given)


def gather(memory: Memory) -> None:
    """Checks page and slot tables with a map, in rows that end before the sequences' pages, and lists of pages."""
    rows, kv_len = ints([2, 0, 1]), ints([7, 14, 0])
    pages, slots = ints(range(1, 13)).view(3, 4), ints([*range(14), -1, *range(15, 24)]).view(3, 8)
    for source in (
        GatherSource(pages),
        GatherSource(slots, True, None, ints(range(40, 60))),
        GatherSource(ints(range(1, 10)), False, ints([0, 4, 6, 9]), ints(range(50, 80))),
    ):
        given = source, rows, kv_len, garbage(20).view(4, 5)
        assert_same(memory, launch_gather_table, engine_metadata.gather_table, *given, page_size=PAGE_SIZE)


def slots(memory: Memory) -> None:
    """Checks four given slots for five padded tokens, three of which are live: correct slots, and an invalid one."""
    cases: tuple[tuple[list[int], list[int] | None], ...] = (
        ([9, 4, 7, 8], None),
        ([9, 5, 7, 8], None),
        ([1, -1, 2, 9], [0, 9, 7, 4]),
        ([1, 3, 50, 9], [0, 9, 7, 4]),
    )
    for given, slot_map in cases:
        of_step = {"counts": ints([2, 3, 1, 0]), "slot_of_token": ints([9, 4, 7, 8, 6])}
        to = StepTensors.of(NOTHING, NO_PADS, TableTerms(null_page=slot_map is None), **of_step)
        slots = ints(given), None if slot_map is None else ints(slot_map), to
        assert_same(memory, launch_take_slots, engine_metadata.take_slots, *slots, page_size=PAGE_SIZE)


def pack_mask(memory: Memory) -> None:
    """Checks thirty-nine cells for words that hold more, and positions of three tokens at five.

    More tokens are given, and then fewer.
    """
    lengths = {"seq_of_token": ints([0, 1, 1, 1, 1]), "mask_indptr": torch.tensor([0, 7, 39])}
    for num_cells, positions in ((46, [4, 5, 6, 7]), (21, [4, 5])):
        cells = (torch.arange(num_cells) % 3 > 0).to(torch.uint8)
        step = masked([ints([2, 3, 1, 0]), ints([7, 16]), ints([1, 2])], 3, 5, window_start=garbage(5), **lengths)
        given = cells, ints(positions)
        assert_same(memory, launch_pack_mask, engine_metadata.pack_mask, *given, window_left=4, to=step)


def check_pages(memory: Memory) -> None:
    """Rows of five pages whose sequences end before them, of which one has a page that does not exist; and a pad.

    Spans lead to that page, or up to it, and to page 0, which is one in the second table.
    """
    table = ints([1, 2, 99, -1, 99, 5, 0, 3, 2, 1, -1, 6, 7, 99, 99]).view(3, 5)
    for num_pages, null_page, spans_pass, begins in (
        (8, True, False, [1, 3, 0, 0]),
        (7, True, False, [1, 3, 0, 0]),
        (8, True, True, [1, 6, 3, 3]),
        (8, True, True, [1, 5, 3, 3]),
        (8, False, True, [1, 5, 3, 3]),
        (8, True, True, [1, 6, 3, 2]),
        (8, True, True, [1, 6, -4, -4]),
    ):
        spans = (torch.cat([ints(each), garbage(2)]) for each in (begins, [6, 0, 9, 9]))
        step = StepTensors.of(
            NOTHING,
            Pads(2, 0),
            TableTerms(null_page=null_page),
            q_len=ints([1, 1, 2, 0]),
            table=table,
            **dict(zip(("span_begin", "span_end"), spans, strict=True)),
            counts=ints([3, 4, 41, 0]),
            row_of_seq=ints([0, 1, 2, 0]),
            kv_len=ints([6, 15, 9, 2]),
        )
        options = {"page_size": 3, "window_left": 4, "spans_pass": spans_pass, "chunk": 11}
        assert_same(memory, launch_check_pages, engine_metadata.check_pages, step, ints([num_pages]), **options)


def take_inputs(memory: Memory) -> None:
    """Takes the inputs of `publish` from the second slot, which is due; then neither slot is due."""
    for run in (5, 7):
        inputs = 4, 5, 30, 40, 1, 2, 11, 12, 13, 16, 32, 1, 2
        slots = [[2, 3, 9, 1, 8, TAKEN_BY_GRAPH, -1, runs_before, *inputs] for runs_before in (6, 5)]
        given, to = torch.stack([ints(slot) for slot in slots]), replace(published(), counts=ints([6, 6, 8, 2]))
        assert_same(memory, launch_take_inputs, twins.take_inputs, given, ints([run]), to=to)


WATCHED_PAGE_SIZE, FAR = 4, 0x3F7F7F7F


def _named(since: int, pages: Sequence[int]) -> list[int]:
    return [since << 32 | page for page in pages]


def watch_pages(memory: Memory) -> None:
    """Checks rows that continue and one that does not, one that is not watched, pads, dropped tokens and missing pages.

    In the first case another entry has since written one of the first row's pages; in the second case none was written.
    """
    table = ints([7, 7, 7, 3, 4, 5, 6, 99, -1, 1, 2, 7, 2, 2, 2]).view(5, 3)
    entries = torch.tensor([_named(31, [3, 4, 0]), _named(35, [6, 0, 0]), _named(35, [1, 2, 7])])
    for written, null_page in ((40, True), (20, False)):
        pages = torch.tensor([(written << 32) + cell for cell in (7, 6, 7, 1, 1, 5, 3, 8)])
        rows = ints([38, 30, 6, 7, 40, 30, 7, 8, 40, 33, 1, 2, 39, 33, 1, 1, 30, 9, 9, 9, 40, 9, 9, 9]).view(3, 8)
        step = StepTensors.of(
            NOTHING,
            NO_PADS,
            TableTerms(null_page=null_page),
            counts=ints([4, 6, 41, 0]),
            row_of_seq=ints([1, 2, 3, 4, FAR, FAR]),
            kv_len=ints([9, 6, 12, 4, FAR, FAR]),
            q_len=ints([1, 4, 0, 1, FAR, FAR]),
            seq_of_token=ints([0, 1, 1, 1, 1, 3, FAR, FAR]),
            position_of_token=ints([8, 2, 3, 4, 5, 3, FAR, FAR]),
            slot_of_token=ints([20, 26, 27, 99 * WATCHED_PAGE_SIZE, 0 if null_page else -1, 11, FAR, FAR]),
            table=table,
        )
        given = step, ints([0, 1, 2, 9, FAR, FAR]), PageWatch(entries, pages, rows)
        assert_same(memory, launch_watch_pages, page_watch.watch_pages, *given, page_size=WATCHED_PAGE_SIZE)


def device_inputs(memory: Memory) -> None:
    """Checks two sequences of up to five tokens, at five and seven, within their bounds and not.

    Lengths also lie below the shared length and above the stored one.
    """
    slot = ints([2, 5, 9, 0, 8, 0, 8, 0, 4, 5, 30, 40, 3, 2])
    for kv_len, q_len, first_writable, stored in (
        ([29, 40], [1, 2], [28, 0], [28, 38]),
        ([31, 1], [4, 2], [0, 0], [40, 40]),
        ([29, 1], [3, 1], [28, 9], [40, 40]),
        ([20, 30], [3, 2], [0, 0], [9, 27]),
    ):
        ids = ints([11, 12, 13, 14, 15])
        given = GivenInputs(ints(kv_len), ints(q_len), ids, ints(first_writable), ints(stored))
        to = {"counts": ints([2, 5, 9, 0]), "kv_len": garbage(5), "q_len": garbage(5), "token_ids": garbage(7)}
        step = StepTensors.of(NOTHING, **to)
        assert_same(memory, launch_device_inputs, twins.device_inputs, slot, given, step)


def draft_steps(memory: Memory) -> None:
    """Checks three steps of two branches; two sequences and two pads, and a gap after each step's part."""
    kv_len, token_ids, mask_start, parents = (garbage(size) for size in (15, 27, 15, 24))
    kv_len[:2] = ints([9, 30])
    launch, twin = (
        partial(of_draft_steps(derive, Pads(5, 0)), num_seqs=4, branches=2, steps=3)
        for derive in (launch_draft_steps, twins.draft_steps)
    )
    assert_same(memory, launch, twin, ints([2, 4, 1, 0]), kv_len, token_ids, mask_start, parents)


def place_spans(memory: Memory) -> None:
    """Checks spans of three sequences and a pad: more than are read at once, and tokens past the padded ones.

    Then spans that share tokens, within those read at once and across; then only tokens before the new ones, or pads.
    """
    many = [(1, place, place + 1) for place in range(10, 80)]
    rest = [(2, 0, 1), (2, 1, 3), (5, 0, 9)]
    cases = [[(0, 7, 9), *many, *rest], [(0, 6, 8), (0, 7, 9), *many, *rest], [(1, 30, 40), *many, (1, 35, 50)]]
    cases += [[(0, 2, 9), (0, 1, 6), *many], [*many, (3, 0, 1), (3, -5, 9)]]
    for num_tokens, case in itertools.product((90, 40), cases):
        spans = torch.tensor(case, dtype=torch.int32)
        lengths = {"counts": ints([3, 77, 1, 0]), "kv_len": ints([9, 80, 4, 1]), "q_len": ints([3, 70, 4, 1])}
        of_tokens = {name: garbage(num_tokens) for name in ("mask_positions", "span_begin", "span_end")}
        step = StepTensors.of(NOTHING, mask_start=garbage(4), **lengths, **of_tokens)
        assert_same(memory, launch_place_spans, twins.place_spans, spans, to=step)


def visible_ranges(memory: Memory) -> None:
    """Checks windows, chunks, spans and cells of four sequences, and tokens of none; the second has cells.

    The last has fewer keys than new tokens.
    """
    q_len, kv_len, tail = [3, 4, 2, 3], [9, 30, 2, 1], 3
    places = [place for new, length in zip(q_len, kv_len, strict=True) for place in range(length - new, length)]
    seqs = [seq for seq, new in enumerate(q_len) for _ in range(new)]
    begins, ends = [0, 7, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 9, 9, 1, 1, 1, 1, 2, 2, 0, 0, 0]
    spans = {
        name: torch.cat([ints(list(each)), garbage(tail)])
        for name, each in (("window_start", range(-4, 8)), ("span_begin", begins), ("span_end", ends))
    }
    step = StepTensors.of(
        NOTHING,
        counts=ints([4, 12, 1, 0]),
        kv_len=ints(kv_len),
        seq_of_token=ints(seqs + [3] * tail),
        position_of_token=ints(places + [0] * tail),
        mask_start=ints([9, 26, 2, 1]),
        **spans,
    )
    for visibility in (
        Visibility(masked=True),
        Visibility(window_right=UNLIMITED_WINDOW),
        Visibility(window_left=2, masked=True, spans_pass=True),
        Visibility(window_left=6, chunk=8, masked=True),
        Visibility(window_left=3, chunk=4),
        Visibility(window_left=2, window_right=1),
        Visibility(window_right=2, masked=True),
    ):
        assert_same(memory, launch_visible_ranges, _twin_of_ranges, step, visibility, garbage(15), garbage(15))


def _twin_of_ranges(step: StepTensors, visibility: Visibility, first: Tensor, end: Tensor) -> None:
    for to, values in zip((first, end), twins.visible_ranges(step, visibility), strict=True):
        to.copy_(values)


def chunk_starts(memory: Memory) -> None:
    """Checks sequences without keys, and with chunks whole and in part; more than a program takes."""
    kv_len = ints([0, 1, 7, 8, 9, 24, 40] * 30)
    for chunk, page_size in ((8, 4), (8, 8), (24, 1)):
        sizes = {"chunk": chunk, "page_size": page_size}
        assert_same(memory, _starts, _twin_of_starts, kv_len, garbage(210), garbage(210), sizes)


def _starts(kv_len: Tensor, in_chunk: Tensor, first_page: Tensor, sizes: dict[str, int]) -> None:
    launch_chunk_starts(kv_len, **sizes, in_chunk=in_chunk, first_page=first_page)


def _twin_of_starts(kv_len: Tensor, in_chunk: Tensor, first_page: Tensor, sizes: dict[str, int]) -> None:
    for seq, length in enumerate(kv_len.tolist()):
        start = max(range(0, max(length, 1), sizes["chunk"]))
        in_chunk[seq], first_page[seq] = length - start, start // sizes["page_size"]


def place_trees(memory: Memory) -> None:
    """Checks trees of three sequences and a pad, of new nodes alone and of nodes before them, and shared words.

    There is room for all of their tokens or for fewer; one case has no window; some parents are invalid for new nodes.
    """
    right, wrong = [0, 0, 1, 2, 9, 9, 0, 0, 1, 9, 9, 9, 0, 0, 1, 2, 9, 9], [-1, 0, 0, 1, 2, -1, -1, 0, 1, 9, 3, 7]
    lines = [[-1, *right[1:6], -1, *right[7:12], -1, *right[13:]], [*wrong, -1, -1, 1, 2, 3, 0]]
    for nodes_before, branches, num_tokens, num_starts in ((0, 0, 9, 9), (2, 0, 5, 5), (2, 2, 9, 9), (3, 0, 9, 0)):
        for parents in lines:
            of_tokens = {"mask_start": garbage(4), "window_start": garbage(num_starts)}
            step = masked([ints([3, 7, 1, 0]), ints([9, 5, 7, 0]), ints([3, 2, 2, 0])], 3, num_tokens, **of_tokens)
            given: dict[str, Any] = {"nodes_before": nodes_before, "branches": branches, "window_left": 1, "to": step}
            assert_same(memory, launch_place_trees, twins.place_trees, ints(parents).view(3, 6), **given)
