"""The state of rows and pages between steps, and the reports: kernel and torch twin against plain Python."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.metadata.error_word import PAGE_TAKEN
from rocm_attn.kernels.metadata.page_watch import PageWatch
from rocm_attn.kernels.metadata.step_tensors import NO_PADS, StepTensors, TableTerms
from rocm_attn.kernels.metadata.watch_pages import launch_watch_pages
from rocm_attn.kernels.refs import page_watch as twins
from tests.amd.kernels.attention_cases import GARBAGE

Launch = Callable[..., None]
watches = pytest.mark.parametrize("watch_pages", [launch_watch_pages, twins.watch_pages], ids=["kernel", "twin"])
ROWS, WIDTH, PAGES = 5, 6, 28


@dataclass
class ByHand:
    """The watch in plain Python, one entry after the other.

    named, written: cell or page -> step and page or cell; rows: since, begin, end
    """

    page_size: int
    first_page: int
    named: dict[int, tuple[int, int]] = field(default_factory=dict)
    written: dict[int, tuple[int, int]] = field(default_factory=dict)
    rows: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def step(self, now: int, table: list[list[int]], seqs: list[tuple[int, int, int]], dropped: set[int]) -> bool:
        """Runs a step. True if a page was taken. seqs: row, kv_len, new tokens; dropped: tokens that are not stored"""
        reported, size, writes = False, self.page_size, []
        first = 0
        for row, length, new in seqs:
            begin, cell = length - new, row * WIDTH
            since, was_begin, was_end = self.rows.get(row, (now, 0, 0))
            last = max(begin - 1, 0) // size
            named = self.named.get(cell + last, (0, -1))
            goes_on = begin > 0 and was_begin <= begin <= was_end and named[1] == table[row][last] and named[0] >= since
            since = since if goes_on else now
            for page_no in range(-(-length // size)):
                page, seen = table[row][page_no], self.named.get(cell + page_no, (0, -1))
                if not self.first_page <= page < PAGES:
                    continue
                known = seen[1] == page and seen[0] >= since
                step_of_write, by = self.written.get(page, (0, cell + page_no))
                is_read = new > 0 or (page_no + 1) * size <= length
                taken = known and is_read and step_of_write > seen[0] and by != cell + page_no
                reported |= taken
                if taken or not known:
                    self.named[cell + page_no] = now, page
            self.rows[row] = since, begin, length
            writes += [
                (table[row][at // size], cell + at // size)
                for token, at in enumerate(range(begin, length), first)
                if token not in dropped and self.first_page <= table[row][at // size] < PAGES
            ]
            first += new
        for page, by in writes:
            reported |= any(other == page and its != by for other, its in writes)
            self.written[page] = now, max(its for other, its in writes if other == page)
        return reported


Seqs = list[tuple[int, int, int]]
Table = list[list[int]]


class Both:
    """A launch next to plain Python. Padded entries hold garbage."""

    def __init__(self, watch_pages: Launch, page_size: int, null_page: bool, device: torch.device) -> None:
        self.watch_pages, self.device, self.page_size = watch_pages, device, page_size
        self.watch = PageWatch.of(ROWS, WIDTH, PAGES, device)
        self.hand = ByHand(page_size, int(null_page))
        self.null_page, self.number = null_page, 0

    def ints(self, values: list[int], pads: int) -> Tensor:
        return torch.tensor([*values, *[GARBAGE] * pads], dtype=torch.int32, device=self.device)

    def step(self, table: Table, seqs: Seqs, dropped: set[int]) -> bool:
        """Launches the next step twice. True if it reports a page."""
        self.number += 1
        wanted = self.hand.step(self.number, table, seqs, dropped)
        places = [(seq, row, at) for seq, (row, kv, new) in enumerate(seqs) for at in range(kv - new, kv)]
        size, lost = self.page_size, 0 if self.null_page else -1
        slots = [
            lost if token in dropped or table[row][at // size] < 0 else table[row][at // size] * size + at % size
            for token, (_, row, at) in enumerate(places)
        ]
        of_seq = [self.ints([seq[field] for seq in seqs], 2) for field in range(3)]
        step = StepTensors.of(
            torch.empty(0, dtype=torch.int32, device=self.device),
            NO_PADS,
            TableTerms(null_page=self.null_page),
            counts=self.ints([len(seqs), len(places), self.number, 0], 0),
            row_of_seq=of_seq[0] + 1,
            kv_len=of_seq[1],
            q_len=of_seq[2],
            seq_of_token=self.ints([seq for seq, _, _ in places], 3),
            position_of_token=self.ints([at for _, _, at in places], 3),
            slot_of_token=self.ints(slots, 3),
            table=torch.tensor([[7] * WIDTH, *table], dtype=torch.int32, device=self.device),
        )
        for _ in range(2):
            self.watch_pages(step, of_seq[0], self.watch, page_size=size)
            assert step.counts.tolist() == [len(seqs), len(places), self.number, PAGE_TAKEN * wanted]
        return wanted


def meet(table: Table, seqs: Seqs, size: int) -> bool:
    """True if a page written in a step is also an entry of another cell of the step: reported now or later."""
    cells = {(row, page_no) for row, kv, _ in seqs for page_no in range(-(-kv // size))}
    written = {(row, at // size) for row, kv, new in seqs for at in range(kv - new, kv)}
    return any(a != b and table[a[0]][a[1]] == table[b[0]][b[1]] for a in written for b in cells)


@pytest.mark.fast(1)
@watches
@pytest.mark.parametrize("null_page", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_each_step_tells_what_plain_python_tells(
    watch_pages: Launch, page_size: int, null_page: bool, kernel_device: torch.device
) -> None:
    """Rows continue, go back or are replaced, with new tokens or none, over a table whose entries change."""
    choice, reported = random.Random(1), []
    for _ in range(2):
        both = Both(watch_pages, page_size, null_page, kernel_device)
        pages = choice.sample(range(-1, ROWS * WIDTH - 1), ROWS * WIDTH)
        table = [pages[row * WIDTH : row * WIDTH + WIDTH] for row in range(ROWS)]
        lengths = dict.fromkeys(range(ROWS), 0)
        for _ in range(14):
            seqs = []
            for row in choice.sample(range(ROWS), choice.randint(1, 3)):
                begin = choice.choice([lengths[row]] * 6 + [max(lengths[row] - 1, 0), choice.randint(0, WIDTH)])
                new = choice.randint(0 if begin else 1, 3 * page_size)
                lengths[row] = min(begin + new, WIDTH * page_size)
                seqs.append((row, lengths[row], max(lengths[row] - begin, 0)))
            if not meet(table, seqs, page_size):
                reported.append(both.step(table, seqs, {choice.randint(0, 9)}))
            row, page_no = choice.randrange(ROWS), choice.randrange(WIDTH)
            table[row][page_no] = choice.choice([*choice.choice(table), *choice.choice(table), -1, 0, PAGES])
    assert True in reported
    assert reported.count(False) > 10


@watches
def test_a_page_that_two_entries_write_in_one_step_is_reported(
    watch_pages: Launch, kernel_device: torch.device
) -> None:
    both = Both(watch_pages, 4, True, kernel_device)
    table = [[2, 3, 4, 0, 0, 0], [5, 6, 7, 0, 0, 0], *[[0] * WIDTH] * 3]
    assert not both.step(table, [(0, 8, 8), (1, 8, 8)], set())
    table[1][2] = 4
    assert both.step(table, [(0, 9, 1), (1, 9, 1)], set())


@watches
def test_a_long_row_is_looked_at_to_its_end(watch_pages: Launch, kernel_device: torch.device) -> None:
    """The row has more pages than a program reads in one step."""
    width = 5000
    watch = PageWatch.of(2, width, 2 * width, kernel_device)
    table = torch.arange(2 * width, dtype=torch.int32, device=kernel_device).view(2, width)
    ints = partial(torch.tensor, dtype=torch.int32, device=kernel_device)

    def step(number: int, row: int, length: int, new: int) -> int:
        of = StepTensors.of(
            ints([]),
            counts=ints([1, new, number, 0]),
            row_of_seq=ints([row]),
            kv_len=ints([length]),
            q_len=ints([new]),
            seq_of_token=ints([0] * new),
            position_of_token=ints(range(length - new, length)),
            slot_of_token=table[row, length - new : length].clone(),
            table=table,
        )
        watch_pages(of, ints([row]), watch, page_size=1)
        return int(of.counts[3])

    assert step(1, 0, 4990, 4990) == step(2, 1, 10, 10) == step(3, 0, 4991, 1) == 0
    table[1, 10] = table[0, 4985]
    assert step(4, 1, 11, 1) == 0
    assert step(5, 0, 4992, 1) == PAGE_TAKEN
    assert step(6, 0, 4993, 1) == 0
