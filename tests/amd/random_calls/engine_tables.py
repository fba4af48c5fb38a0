"""EngineTables: an engine's own pages by row, and its table of them in one of several forms."""

from collections.abc import Sequence

import numpy as np
import torch

from rocm_attn.paging.adopted import CsrSource, Source, TableSource, TableUnit
from rocm_lab.soak.seq import Seq

PAGE, WIDTH, ROWS, NUM_PAGES = 4, 12, 8, 60
HOLE = -1


class EngineTables:
    """The pages that an engine has given its rows, and its table of them.

    pages: row -> the page of each page_no
    """

    def __init__(self, kind: str, device: torch.device) -> None:
        self.kind, self.device = kind, device
        self.null_page = kind not in ("gathered", "lists")
        self.hole = 0 if self.null_page else HOLE
        self.pages: dict[int, list[int]] = {}
        self.free = list(range(1 if self.null_page else 0, NUM_PAGES))
        self.make()

    def make(self) -> None:
        """Makes the table that source() names."""
        wide = torch.int32 if self.kind in ("in place", "watched") else torch.int64
        columns = WIDTH * PAGE if self.kind == "slots" else WIDTH
        self.entries = torch.full((ROWS, columns), self.hole, dtype=wide, device=self.device)
        self.indptr = torch.zeros(ROWS + 1, dtype=torch.int32, device=self.device)
        self.indices = torch.full((ROWS * WIDTH,), self.hole, dtype=torch.int32, device=self.device)

    def source(self) -> Source:
        """The engine's table."""
        if self.kind == "lists":
            return CsrSource(self.indptr, self.indices)
        unit = TableUnit.SLOT if self.kind == "slots" else TableUnit.PAGE
        return TableSource(self.entries, unit, null_page=self.null_page)

    def write(self, holes: Sequence[tuple[int, int, int]] = ()) -> None:
        """Writes the engine's pages into its table. holes: (row, page_no, page) that are written otherwise"""
        pages = {row: list(its) for row, its in self.pages.items()}
        for row, page_no, page in holes:
            pages[row][page_no] = page
        if self.kind == "lists":
            listed = [pages.get(row, []) for row in range(ROWS)]
            flat = [page for its in listed for page in its]
            self.indptr.copy_(torch.tensor(np.cumsum([0, *map(len, listed)])))
            self.indices.fill_(self.hole)
            self.indices[: len(flat)] = torch.tensor(flat, dtype=torch.int32, device=self.device)
            return
        table = np.full(self.entries.shape, self.hole)
        for row, its in pages.items():
            entries = its
            if self.kind == "slots":
                entries = [page * PAGE + at if page > 0 else page for page in its for at in range(PAGE)]
            table[row, : len(entries)] = entries
        self.entries.copy_(torch.from_numpy(table))

    def reserve(self, row: int, kv_len: int) -> None:
        """Gives a row the pages of kv_len tokens, or as many of them as are free."""
        while len(self.pages[row]) * PAGE < kv_len and self.free:
            self.pages[row].append(self.free.pop())

    def slots_of(self, seqs: Sequence[Seq]) -> list[int]:
        """The slot of each new token."""
        return [
            self.pages[seq.row][place // PAGE] * PAGE + place % PAGE
            for seq in seqs
            for place in range(seq.begin, seq.end)
        ]

    def release(self, row: int) -> None:
        """The row's pages are free, unless others read them too."""
        its = self.pages.pop(row)
        held = {page for pages in self.pages.values() for page in pages}
        self.free[:0] = [page for page in its if page not in held]
        self.write()
