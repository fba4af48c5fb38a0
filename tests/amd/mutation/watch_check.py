"""Checks of the masks of the launch that watches pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rocm_attn.kernels.metadata.step_tensors import TableTerms
from rocm_attn.kernels.metadata.watch_pages import launch_watch_pages
from rocm_attn.kernels.refs import page_watch as twins
from tests.amd.kernels.launches_of_tensors import of_watch_pages
from tests.amd.mutation.memory import Memory, assert_same

Launch = Callable[..., None]
PAGE_SIZE, WIDTH, PAGES, FAR = 4, 3, 8, 0x3F7F7F7F


def _ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _named(since: int, pages: Sequence[int]) -> list[int]:
    return [since << 32 | page for page in pages]


def watch_pages(memory: Memory) -> None:
    """Checks rows that continue and one that does not, one that is not watched, pads, dropped tokens and missing pages.

    In the first case another entry has since written one of the first row's pages; in the second case none was written.
    """
    table = torch.tensor([[7, 7, 7], [3, 4, 5], [6, 99, -1], [1, 2, 7], [2, 2, 2]], dtype=torch.int32)
    entries = torch.tensor([_named(31, [3, 4, 0]), _named(35, [6, 0, 0]), _named(35, [1, 2, 7])])
    for written, null_page in ((40, True), (20, False)):
        pages = torch.tensor([(written << 32) + cell for cell in (7, 6, 7, 1, 1, 5, 3, 8)])
        rows = _ints([38, 30, 6, 7, 40, 30, 7, 8, 40, 33, 1, 2, 39, 33, 1, 1, 30, 9, 9, 9, 40, 9, 9, 9]).view(3, 8)
        outputs = [_ints([4, 6, 41, 0]), entries.clone(), pages, rows]
        inputs = [
            _ints([1, 2, 3, 4, FAR, FAR]),
            _ints([9, 6, 12, 4, FAR, FAR]),
            _ints([1, 4, 0, 1, FAR, FAR]),
            _ints([0, 1, 1, 1, 1, 3, FAR, FAR]),
            _ints([8, 2, 3, 4, 5, 3, FAR, FAR]),
            _ints([20, 26, 27, 99 * PAGE_SIZE, 0 if null_page else -1, 11, FAR, FAR]),
            table,
            _ints([0, 1, 2, 9, FAR, FAR]),
        ]

        def launch(of: Launch, *tensors: Tensor, page_size: int) -> None:
            *given, engine_row, counts, entries, pages, rows = tensors
            of(counts, *given, engine_row, entries, pages, rows, page_size=page_size)

        terms = TableTerms(null_page=null_page)
        kernel, twin = (
            partial(launch, of_watch_pages(each, terms)) for each in (launch_watch_pages, twins.watch_pages)
        )
        assert_same(memory, kernel, twin, inputs, outputs, page_size=PAGE_SIZE)
