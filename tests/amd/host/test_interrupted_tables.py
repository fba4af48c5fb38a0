"""A request table interrupted at any line: a page may be lost, but no two owners hold it unaware of each other."""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count, product

import numpy as np
import pytest
import torch

from rocm_attn.errors import RocmAttnError
from rocm_attn.paging.index_spaces import RESERVED_PAGE, Space
from rocm_attn.paging.page_table import PageTable, SpacePages
from rocm_attn.paging.request_table import RequestTable
from tests.amd.runtime.interrupts import interrupted_at


def make_table() -> RequestTable:
    """Returns a table with rows of 8 pages of 4 tokens, and as many pages in a space with a window of 5."""
    return RequestTable(
        max_num_seqs=4,
        max_kv_len=32,
        num_pages=40,
        page_size=4,
        device=torch.device("cpu"),
        windows=(SpacePages(Space.SWA, 80, "swa_pages", window_left=5, first_page=40),),
    )


def kept_in(table: RequestTable, space: int) -> Counter[int]:
    """Returns kept page -> number of keeps, in the entries that admit_over would hold."""
    return Counter(table.kept._pages[space, table.kept._ids > 0].tolist())


def pages_are_safe(table: RequestTable, rows: list[int]) -> None:
    """Checks that no page is free and held, free twice, or held more often than counted; copies read kept pages."""
    for space, pages in enumerate(table.spaces):
        held = Counter(page for row in rows for page in table.pages_of(row, pages.space).tolist())
        held += kept_in(table, space)
        del held[RESERVED_PAGE]
        free, sources = Counter(pages._free), Counter(pages._sources)
        assert max((free + sources).values(), default=1) == 1, "a page is free twice"
        assert RESERVED_PAGE not in free + sources
        assert not (held & (free + sources)), "a page is free and held"
        assert all(count <= pages._holders[page] for page, count in held.items()), "a page is shared uncounted"
        targets, read = Counter(pages.pending.copies.keys()), Counter(set(pages.pending.copies.values()))
        assert not (targets & free), "a page that is to be written is free"
        assert not (read & free), "a page that is to be read is free"
        listed = {(row, page_no) for row, page_no, _ in pages.pending_updates().tolist()}
        assert_device_will_know(pages, rows, table, listed)


def tokens_are_safe(table: RequestTable, rows: list[int]) -> None:
    """Checks that stored tokens have pages, and that a row may not store in a page that another row also holds.

    The check does not use counts of holders: a fork lost by an interrupt holds pages too, but nothing reads them.
    """
    for row in rows:
        room, first_writable = int(table._rows.reserved_len[row]), int(table.tokens.first_writable[row])
        assert table.tokens.stored_len[row] <= room, "tokens without pages count as stored"
        for pages, other in product(table.spaces, set(rows) - {row}):
            of_both = min(room, int(table._rows.reserved_len[other]))
            both = zip(*(table.pages_of(one, pages.space).tolist() for one in (row, other)), strict=False)
            for page_no, (page, others) in enumerate(both):
                if page == others != RESERVED_PAGE:
                    assert min(of_both, (page_no + 1) * 4) <= first_writable, "a row may store where another one reads"
        for space, pages in enumerate(table.spaces):
            for page_no, page in enumerate(table.pages_of(row, pages.space).tolist()):
                if page and page in kept_in(table, space):
                    assert min(room, (page_no + 1) * 4) <= first_writable, "a row may store in a kept page"


def assert_device_will_know(
    pages: PageTable, rows: list[int], table: RequestTable, listed: set[tuple[int, int]]
) -> None:
    """Checks that every entry in which the device differs is among the pending changes."""
    for row in rows:
        end = len(table.pages_of(row, pages.space))
        differ = np.flatnonzero(pages.entries_host[row, :end] != pages.entries[row, :end].numpy())
        assert {(row, int(page_no)) for page_no in differ} <= listed, "a page is not among the device's changes"


def deliver(table: RequestTable) -> None:
    """Brings the device up to date, as a step does."""
    for pages in table.spaces:
        row, column, entry = torch.from_numpy(pages.pending_updates()).long().unbind(1)
        pages.entries[row, column] = entry.int()
        pages.pending.cells.clear()
        pages.copies_made()


def keep(table: RequestTable, row: int, ids: list[int], rng: random.Random) -> None:
    """Keeps some of a row's first pages, in both spaces while the other one has them."""
    end = rng.randint(0, int(table.tokens.stored_len[row]) // 4)
    spaces = [Space.FULL] if rng.random() < 0.3 else [Space.FULL, Space.SWA]
    ids += table.kept.keep(row, 0, end, spaces).tolist()


def drop(table: RequestTable, ids: list[int], rng: random.Random) -> None:
    """Drops some of the kept pages, or one space of them. An interrupted call may have dropped them already."""
    some = rng.sample(ids, rng.randint(0, min(3, len(ids))))
    table.kept.drop(some, [[Space.FULL, Space.SWA], [Space.SWA]][rng.random() < 0.3])


def over_kept(table: RequestTable, ids: list[int], rng: random.Random) -> int:
    """Admits a row over as many kept pages as form a sequence."""
    run: list[int] = []
    for id_ in ids:
        with suppress(RocmAttnError):
            if table.kept._page_no[table.kept._places([id_])].tolist() == [len(run)]:
                run.append(id_)
    run = run[: rng.randint(0, len(run))]
    return table.kept.admit_over(run, max(0, 4 * len(run) - rng.randint(0, 3)))


def call_of(table: RequestTable, rows: list[int], ids: list[int], rng: random.Random) -> Callable[[], object]:
    """Returns a call that the owner of the rows may make next."""
    row = rng.choice(rows)
    room = int(table._rows.reserved_len[row])
    some = np.array(rng.sample(rows, rng.randint(1, len(rows))), np.int32)
    longer = np.array([min(32, int(table._rows.reserved_len[at]) + rng.randint(0, 9)) for at in some], np.int32)
    return rng.choice(
        (
            partial(table.reserve, row, min(32, room + rng.randint(0, 12))),
            partial(table.reserve_all, some, longer),
            partial(table.truncate, row, rng.randint(0, room)),
            partial(table.evict, some, np.array([rng.randint(0, int(table._rows.reserved_len[at])) for at in some])),
            partial(table.mark_stored, np.array([row]), np.array([rng.randint(0, room)])),
            partial(keep, table, row, ids, rng),
            partial(drop, table, ids, rng),
            partial(deliver, table),
        )
    )


def lives(seed: int, table: RequestTable, interrupt: Callable[[Callable[[], object]], bool]) -> int:
    """Runs random calls on a table, which may be interrupted and then repeated. Returns the number of interrupts."""
    rng, rows, interrupted = random.Random(seed), [table.admit()], 0
    ids: list[int] = []
    for _ in range(24):
        chance = rng.random()
        if chance < 0.2 and table.num_free_rows:
            parent = rng.choice(rows)
            make = partial(table.fork, parent, rng.randint(0, int(table._rows.reserved_len[parent])))
            if rng.random() < 0.4:
                make = partial(over_kept, table, ids, rng)
            made: list[int] = []
            interrupted += interrupt(partial(attempt, lambda: made.append(make())))  # noqa: B023
            rows += made
        elif chance < 0.3 and len(rows) > 1:
            row = rng.choice(rows)
            if interrupt(partial(attempt, partial(table.free, row))):
                interrupted += 1
                pages_are_safe(table, [at for at in rows if table._rows.capacity[at] >= 0])
                attempt(partial(table.free, row))
            rows.remove(row)
        else:
            call = partial(attempt, call_of(table, rows, ids, rng))
            if interrupt(call):
                interrupted += 1
                pages_are_safe(table, rows)
                tokens_are_safe(table, rows)
                if rng.random() < 0.5:
                    call()
        pages_are_safe(table, rows)
        tokens_are_safe(table, rows)
    return interrupted


def attempt(call: Callable[[], object]) -> None:
    """Makes a call that may be refused: pages and rows may be short, more so if some were lost."""
    with suppress(RocmAttnError):
        call()


@pytest.mark.fast(8)
@pytest.mark.parametrize("seed", range(60))
def test_no_page_is_held_by_two_unknowing_whatever_was_interrupted(seed: int) -> None:
    lines = random.Random(-seed)
    assert lives(seed, make_table(), lambda call: interrupted_at(lines.randint(1, 60), call)) > 0


@pytest.mark.fast(8)
@pytest.mark.parametrize("seed", range(60))
def test_pages_that_interrupts_have_lost_come_back_when_nothing_is_kept_any_more(seed: int) -> None:
    """The only exception is pages of a row whose number its owner never got."""
    table, lines = make_table(), random.Random(-seed)
    lives(seed, table, lambda call: interrupted_at(lines.randint(1, 60), call))
    interrupted_at(lines.randint(1, 30), table.kept.drop_all)
    table.kept.drop_all()
    pages_are_safe(table, [row for row in range(1, 5) if table._rows.capacity[row] >= 0])
    assert not (table.kept._ids > 0).any()
    assert sorted(table.kept._free_places) == [*range(len(table.kept._ids))], "places of ids are lost"
    deliver(table)
    for pages in table.spaces:
        held = set(pages.entries_host[pages.entries_host != RESERVED_PAGE].tolist())
        assert pages.num_free_pages == pages.num_usable_pages - len(held)


def test_a_drop_that_was_interrupted_may_be_repeated() -> None:
    for line in count(1):
        table = make_table()
        row = table.admit()
        table.reserve(row, 8)
        table.mark_stored([row], [8])
        ids = table.kept.keep(row, 0, 2)
        if not interrupted_at(line, partial(table.kept.drop, ids)):
            break
        table.kept.drop(table.kept.ids())
        assert len(table.kept.ids()) == 0
    assert line > 9


def test_a_copy_that_an_interrupt_has_left_goes_with_the_last_kept_page() -> None:
    """Its target is free, so a later copy of that page, for the next row that holds it, would be one of the source."""
    for number in range(1, 1000):
        table = make_table()
        parent = table.admit()
        table.reserve(parent, 6)
        child = table.fork(parent, 6)
        if not interrupted_at(number, partial(table.reserve, child, 7)):
            return
        table.kept.drop_all()
        for pages in table.spaces:
            assert set(pages.pending.copies) <= set(table.pages_of(child, pages.space).tolist())


def test_without_interrupts_no_page_is_lost() -> None:
    for seed in range(8):
        table = make_table()
        lives(seed, table, lambda call: bool(call()))
        rows = [row for row in range(1, 5) if table._rows.capacity[row] >= 0]
        deliver(table)
        for row in rows:
            table.free(row)
        table.kept.drop(table.kept._ids[table.kept._ids > 0])
        deliver(table)
        assert [pages.num_free_pages for pages in table.spaces] == [39, 40]
