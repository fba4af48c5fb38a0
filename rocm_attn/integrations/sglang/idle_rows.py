"""Borrows a row and free slots of SGLang's pools during a step, for the needle check of the layers (rocm_attn/truth).

The row is the one that SGLang keeps for padding. SGLang's scheduler lends them before a step, and takes them back after
it. Each rank has a scheduler of its own, and all of them count the same steps. Slots that only the radix cache holds
are evicted for it, as for a request.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.mem_cache.common import evict_from_tree_cache
from torch import Tensor

from rocm_attn.integrations.sglang.seen import PAD_ROW, slot_map
from rocm_attn.machine.settings import read_settings
from rocm_attn.truth.adopted import NO_ROW, DueSteps, EngineRow
from rocm_attn.truth.row_needles import MOST_TOKENS

_due: WeakKeyDictionary[Any, DueSteps] = WeakKeyDictionary()


class _Lent:
    """The row that is lent now. turns: lendings so far"""

    def __init__(self) -> None:
        self.row, self.turns = NO_ROW, 0


_lent = _Lent()


def lent_row() -> EngineRow:
    """Returns the row that is lent for the step that is run; NO_ROW if none is."""
    return _lent.row


def lend(run_batch: Callable[..., Any], scheduler: Any, batch: Any, *given: Any, **named: Any) -> Any:
    """Runs a step of SGLang's scheduler, with a row lent if needles are due: a hook around Scheduler.run_batch."""
    if scheduler not in _due:
        _due[scheduler] = DueSteps(read_settings(os.environ).needles_every)
    steps = _due[scheduler]
    if not steps.is_due() or not (slots := _take(scheduler)).numel():
        return run_batch(scheduler, batch, *given, **named)
    _lent.turns += 1
    _lent.row = EngineRow(_lent.turns, PAD_ROW, slots)
    allocator = scheduler.token_to_kv_pool_allocator
    try:
        with _mapped_anew(allocator, slots):
            return run_batch(scheduler, batch, *given, **named)
    finally:
        _lent.row = NO_ROW
        allocator.free(slots)
        steps.done()


@contextmanager
def _mapped_anew(allocator: Any, slots: Tensor) -> Iterator[None]:
    """Maps slots to those of the pool of windows in another order, page by page, if there is such a pool.

    Often both pools give out the same numbers, and then a layer that reads the wrong one of them would not be noticed.
    """
    mapping = slot_map(allocator.get_kvcache())
    if mapping is None:
        yield
        return
    mapped = mapping[slots]
    mapping[slots] = mapped.roll(allocator.page_size)
    try:
        yield
    finally:
        mapping[slots] = mapped


def _take(scheduler: Any) -> Tensor:
    """Takes whole pages for the longest row of needles, in no order: int64 [n]; none if there are too few."""
    allocator, table = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool.req_to_token
    page_size, device = allocator.page_size, table.device
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    count = min(-(-MOST_TOKENS // page_size), table.shape[1] // page_size) * page_size
    if not count:
        return nothing
    # SGLang asks for up to two pages more than an extend needs.
    evict_from_tree_cache(scheduler.tree_cache, count + 2 * page_size)
    if page_size == 1:
        slots = allocator.alloc(count)
    else:
        before, after = torch.zeros(1, dtype=torch.int64), torch.tensor([count])
        last = torch.full((1,), -1, dtype=torch.int64, device=device)
        slots = allocator.alloc_extend(before.to(device), before, after.to(device), after, last, count)
    if slots is None:
        return nothing
    pages = torch.randperm(count // page_size, generator=torch.Generator().manual_seed(_lent.turns))
    shuffled: Tensor = slots.long().view(-1, page_size)[pages.to(device)].flatten()
    return shuffled
