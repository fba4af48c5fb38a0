"""Checks of the masks of the kernels that store, zero and move tokens of pages."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from rocm_attn.kernels.cache.fold_rows import launch_fold_rows
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.move_rows import launch_export_rows, launch_import_rows
from rocm_attn.kernels.cache.page_format import Encoding, PageFormat, PoolKind, Scales
from rocm_attn.kernels.cache.store import launch_store_kv
from rocm_attn.kernels.cache.tails import launch_zero_tails
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.refs import cache as cache_twins
from tests.amd.kernels.fold_cases import step_of_state
from tests.amd.kernels.moved_cases import moved_pages, moved_rows, moved_words, of_moves
from tests.amd.mutation.arguments import assert_same
from tests.amd.mutation.memory import PAGE_SIZE, Memory, gapped, ints
from tests.amd.vectorised import vectorised_keys, vectorised_values


def store(memory: Memory) -> None:
    """Checks three heads of odd dims; the last token is live, one before it is not."""
    same = partial(assert_same, memory, launch_store_kv, cache_twins.store_kv)
    k, v, slots, counts = gapped(4, 3, 24), gapped(4, 3, 40), ints([4, 1, 14, 9]), ints([2, 4, 1, 0])
    same(k, v, slots, counts, plain_pages(5))
    same(k, v, ints([5, 1, 19, 10]), counts, vectorised_pages(5))
    for dims, scales in (((396, 384), Scales.GROUP), ((384, 384), Scales.GROUP), ((256, 256), Scales.FOOTER)):
        form = PageFormat(Encoding.E4M3FN, PoolKind.LATENT, PAGE_SIZE, 1, *dims, scales)
        records = LayerPages.latent(torch.zeros(5, form.line, dtype=torch.uint8).view(form.encoding.dtype), form)
        rows = gapped(4, 1, dims[0])
        same(rows, rows[..., : dims[1]], slots, counts, records)
    for scales in (Scales.HEAD, Scales.TOKEN):
        same(k, v, slots, counts, coded_pages(5, scales))


def tails(memory: Memory) -> None:
    """Checks three heads of odd dims; a sequence without new tokens, a full page, and a length beyond its row."""
    same = partial(assert_same, memory, launch_zero_tails, cache_twins.zero_tails)
    table, rows, kv_len = ints([0, 0, 1, 2, 3, 4, 5, 6]).view(4, 2), ints([1, 2, 3, 2]), ints([4, 5, 3, 7])
    q_len, coded = ints([1, 0, 2, 1]), coded_pages(7, Scales.TOKEN)
    for side in (coded.raw_k, coded.raw_v, coded.k_scale, coded.v_scale):
        assert side is not None
        side[1:] = 1
    step = StepTensors.of(table[:0], table=table, row_of_seq=rows, kv_len=kv_len, q_len=q_len)
    for pages in (plain_pages(7), coded):
        same(step, pages)
    same(replace(step, kv_len=ints([5, 6, 4, 9])), vectorised_pages(7))


def folds(memory: Memory) -> None:
    """Checks rows of 4 tokens that overlap, and of 3: the first row, one over two pages, a token that ends none, a pad.

    The columns are no whole block, and the places no whole number of those that are loaded at once.
    """
    table, row_of_token = ints([1, 2, 3, 4]).view(2, 2), ints([0, 1, 0, 0])
    for tokens, overlaps, positions in ((4, True, [3, 7, 4, 3]), (3, False, [2, 5, 3, 2])):
        columns = 150
        state = LayerPages.plain(*(gapped(5, 4, 1, columns * (1 + overlaps)) for _ in range(2)))
        step = step_of_state(table, row_of_token, ints(positions), ints([2, 3, 0, 0]))
        options = {"tokens": tokens, "overlaps": overlaps}
        folded = state, step, gapped(4, columns)
        assert_same(memory, launch_fold_rows, cache_twins.fold_rows, *folded, **options, near=1e-3)


def plain_pages(num_pages: int) -> LayerPages:
    """Three heads of odd dims with gaps, the first page zero."""
    pages = [gapped(num_pages, 3, PAGE_SIZE, dim).transpose(1, 2) for dim in (24, 40)]
    for side in pages:
        side[0] = 0.0
    return LayerPages.plain(*pages)


def vectorised_pages(num_pages: int) -> LayerPages:
    """Three heads of odd dims in pages of four tokens, the first page zero."""
    k, v = (torch.randn(num_pages, 4, 3, dim) for dim in (24, 40))
    k[0] = v[0] = 0.0
    return LayerPages.plain(vectorised_keys(k, 4), vectorised_values(v, 4))


def coded_pages(num_pages: int, scales: Scales) -> LayerPages:
    """Codes of three heads of odd dims, with gaps, and the scales of K and V."""
    form = PageFormat(Encoding.E4M3FN, PoolKind.SPLIT, PAGE_SIZE, 3, 24, 40, scales)
    pages = [torch.zeros(num_pages, 3, PAGE_SIZE, dim + 8, dtype=torch.uint8)[..., :dim] for dim in (24, 40)]
    k, v = (side.transpose(1, 2).view(form.encoding.dtype) for side in pages)
    values = torch.full((3,), 0.02) if scales is Scales.HEAD else torch.zeros(num_pages, *form.scale_shape)
    return LayerPages(k, v, form, values, values.clone())


def moves(memory: Memory) -> None:
    """Moves tokens from the middle of a page on, and into pages also from a later page on, with the last one's tail."""
    runs: tuple[tuple[Callable[..., None], Callable[..., None], tuple[int, int, int, int]], ...] = (
        (launch_export_rows, cache_twins.export_rows, (4, 6, 16, 16)),
        (launch_import_rows, cache_twins.import_rows, (4, 6, 15, 15)),
        (launch_import_rows, cache_twins.import_rows, (8, 6, 14, 16)),
    )
    for launch, twin, span in runs:
        given = moved_words(*span), moved_rows(*span[1:3]), moved_pages()
        assert_same(memory, of_moves(launch, *span), of_moves(twin, *span), *given)
