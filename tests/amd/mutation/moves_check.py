"""Checks of the masks of a move of tokens between pages and rows."""

from __future__ import annotations

from rocm_attn.kernels.cache.move_rows import launch_export_rows, launch_import_rows
from rocm_attn.kernels.refs import cache as cache_twins
from tests.amd.kernels.moved_cases import moved_pages, moved_rows, moved_words, of_moves
from tests.amd.mutation.memory import Memory, assert_same


def moves(memory: Memory) -> None:
    """Moves tokens from the middle of a page on, and into pages also from a later page on, with the last one's tail."""
    for launch, twin, span in (
        (launch_export_rows, cache_twins.export_rows, (4, 6, 16, 16)),
        (launch_import_rows, cache_twins.import_rows, (4, 6, 15, 15)),
        (launch_import_rows, cache_twins.import_rows, (8, 6, 14, 16)),
    ):
        sides = [moved_rows(*span[1:3]), moved_pages()]
        assert_same(memory, of_moves(launch, *span), of_moves(twin, *span), [moved_words(*span)], sides)
