"""Replaces the rows of an engine's tables by rows of given pages, which no request uses, for trial steps."""

from dataclasses import replace

import torch
from torch import Tensor

from rocm_attn.paging.adopted import AdoptedTables, CsrSource, Source, TableUnit


def name_pages(tables: AdoptedTables, pages: Tensor, own_pages: Tensor, num_rows: int = 1) -> Tensor:
    """Makes num_rows rows of the tables of all spaces name the same pages: use the engine's own tables afterwards.

    pages:     int64 [n], on the device, a row's pages, as entries of the tables name them; a page may come twice
    own_pages: int64 [n], the same pages in spaces that map the table's slots to slots of their own
    Returns the slots of a row's tokens, int64 [n * page_size].
    """
    page_size, device = tables.page_size, tables.device

    def slots_of(pages: Tensor) -> Tensor:
        return (pages[:, None] * page_size + torch.arange(page_size, device=device)).flatten()

    slots = slots_of(pages)

    def source_of(old: Source) -> Source:
        if isinstance(old, CsrSource):
            ends = torch.arange(num_rows + 1, dtype=old.indptr.dtype, device=device) * len(pages)
            return replace(old, indptr=ends, indices=pages.to(old.indices.dtype).repeat(num_rows))
        row = slots if old.unit is TableUnit.SLOT else pages
        room = tables.max_kv_len if old.unit is TableUnit.SLOT else tables.width
        of_each = torch.zeros(max(room, len(row)), dtype=old.entries.dtype, device=device)
        of_each[: len(row)] = row
        entries = of_each.expand(num_rows, -1)
        if not tables.gathered:
            entries = entries.contiguous()  # kernels that read it in place need rows without gaps
        if old.slot_map is None:
            return replace(old, entries=entries)
        slot_map = torch.zeros(1 + int(slots.max()), dtype=old.slot_map.dtype, device=device)
        slot_map[slots] = slots_of(own_pages)
        return replace(old, entries=entries, slot_map=slot_map)

    for table in tables.spaces:
        tables.use(source_of(table.source), table.space)
    return slots
