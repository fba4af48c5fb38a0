"""Checks of the masks of the kernels that store, zero and move tokens of pages."""

from collections.abc import Callable

import torch
from torch import Tensor

from rocm_attn.kernels.cache.fold_rows import launch_fold_rows
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.move_rows import launch_export_rows, launch_import_rows
from rocm_attn.kernels.cache.page_format import Encoding, PageFormat, PoolKind, Scales
from rocm_attn.kernels.cache.store import launch_store_kv
from rocm_attn.kernels.cache.tails import launch_zero_tails
from rocm_attn.kernels.refs import cache as cache_twins
from tests.amd.kernels.launches_of_tensors import of_pages
from tests.amd.kernels.moved_cases import moved_pages, moved_rows, moved_words, of_moves
from tests.amd.mutation.memory import PAGE_SIZE, Memory, assert_same, gapped, ints
from tests.amd.vectorised import vectorised_keys, vectorised_values


def store(memory: Memory) -> None:
    """Checks three heads of odd dims; the last token is live, one before it is not."""
    k, v = gapped(4, 3, 24), gapped(4, 3, 40)
    pages = [gapped(5, 3, PAGE_SIZE, dim).transpose(1, 2) for dim in (24, 40)]
    for side in pages:
        side[0] = 0.0
    inputs = [k, v, ints([4, 1, 14, 9]), ints([2, 4, 1, 0])]
    assert_same(memory, of_pages(launch_store_kv), of_pages(cache_twins.store_kv), inputs, pages)
    inputs[2] = ints([5, 1, 19, 10])
    assert_same(memory, of_pages(launch_store_kv), of_pages(cache_twins.store_kv), inputs, vectorised_pages(5))
    inputs[2] = ints([4, 1, 14, 9])
    for dims, scales in (((396, 384), Scales.GROUP), ((384, 384), Scales.GROUP), ((256, 256), Scales.FOOTER)):
        form = PageFormat(Encoding.E4M3FN, PoolKind.LATENT, PAGE_SIZE, 1, *dims, scales)
        records = torch.zeros(5, form.line, dtype=torch.uint8)
        rows = gapped(4, 1, dims[0])
        launch, twin = (of_records(each, form) for each in (launch_store_kv, cache_twins.store_kv))
        assert_same(memory, launch, twin, [rows, rows[..., : dims[1]], inputs[2]], [inputs[3], records])
    for scales in (Scales.HEAD, Scales.TOKEN):
        store_kv, twin = (of_coded_pages(each, scales) for each in (launch_store_kv, cache_twins.store_kv))
        assert_same(memory, store_kv, twin, inputs, coded_pages(5, scales))


def tails(memory: Memory) -> None:
    """Checks three heads of odd dims; a sequence without new tokens, a full page, and a length beyond its row."""
    pages = [gapped(7, 3, PAGE_SIZE, dim).transpose(1, 2) for dim in (24, 40)]
    for side in pages:
        side[0] = 0.0
    table = ints([0, 0, 1, 2, 3, 4, 5, 6]).view(4, 2)
    inputs = [table, ints([1, 2, 3, 2]), ints([4, 5, 3, 7]), ints([1, 0, 2, 1])]
    assert_same(memory, of_pages(launch_zero_tails), of_pages(cache_twins.zero_tails), inputs, pages)
    coded = coded_pages(7, Scales.TOKEN)
    for side in coded:
        side[1:] = 1
    zero_tails, twin = (of_coded_pages(each, Scales.TOKEN) for each in (launch_zero_tails, cache_twins.zero_tails))
    assert_same(memory, zero_tails, twin, inputs, coded)
    inputs[2] = ints([5, 6, 4, 9])
    assert_same(memory, of_pages(launch_zero_tails), of_pages(cache_twins.zero_tails), inputs, vectorised_pages(7))


def folds(memory: Memory) -> None:
    """Checks rows of 4 tokens that overlap, and of 3: the first row, one over two pages, a token that ends none, a pad.

    The columns are no whole block, and the places no whole number of those that are loaded at once.
    """
    table, row_of_token = ints([1, 2, 3, 4]).view(2, 2), ints([0, 1, 0, 0])
    for tokens, overlaps, positions in ((4, True, [3, 7, 4, 3]), (3, False, [2, 5, 3, 2])):
        columns = 150
        pages = [gapped(5, 4, 1, columns * (1 + overlaps)) for _ in range(2)]
        inputs = [*pages, table, row_of_token, ints(positions), ints([2, 3, 0, 0])]
        rows = [gapped(4, columns)]
        options = {"tokens": tokens, "overlaps": overlaps}
        assert_same(memory, of_state(launch_fold_rows), of_state(cache_twins.fold_rows), inputs, rows, **options)


def of_state(fold: Callable[..., None]) -> Callable[..., None]:
    """A fold as a function of the state's tensors, with rows that are compared where rounding differs."""

    def of_tensors(values: Tensor, gates: Tensor, *rest: Tensor, tokens: int, overlaps: bool) -> None:
        fold(LayerPages.plain(values, gates), *rest, tokens=tokens, overlaps=overlaps)
        # The kernel and its twin add up in other orders.
        rest[-1].copy_((rest[-1] * 1024).round())

    return of_tensors


def vectorised_pages(num_pages: int) -> list[Tensor]:
    """Three heads of odd dims in pages of four tokens, the first page zero."""
    k, v = (torch.randn(num_pages, 4, 3, dim) for dim in (24, 40))
    k[0] = v[0] = 0.0
    return [vectorised_keys(k, 4), vectorised_values(v, 4)]


def moves(memory: Memory) -> None:
    """Moves tokens from the middle of a page on, and into pages also from a later page on, with the last one's tail."""
    for launch, twin, span in (
        (launch_export_rows, cache_twins.export_rows, (4, 6, 16, 16)),
        (launch_import_rows, cache_twins.import_rows, (4, 6, 15, 15)),
        (launch_import_rows, cache_twins.import_rows, (8, 6, 14, 16)),
    ):
        sides = [moved_rows(*span[1:3]), moved_pages()]
        assert_same(memory, of_moves(launch, *span), of_moves(twin, *span), [moved_words(*span)], sides)


def coded_pages(num_pages: int, scales: Scales) -> list[Tensor]:
    """Bytes of three heads of odd dims, with gaps, and the scales of K and V."""
    pages = [torch.zeros(num_pages, 3, PAGE_SIZE, dim + 8, dtype=torch.uint8)[..., :dim] for dim in (24, 40)]
    scale_values = torch.full((3,), 0.02) if scales is Scales.HEAD else torch.zeros(num_pages, PAGE_SIZE, 3)
    return [*(side.transpose(1, 2) for side in pages), scale_values, scale_values.clone()]


def of_records(launch: Callable[..., None], form: PageFormat) -> Callable[..., None]:
    """Adapts to launch(*inputs, bytes of pages of records)."""

    def of_tensors(*tensors: Tensor) -> None:
        launch(*tensors[:-1], LayerPages.latent(tensors[-1].view(form.encoding.dtype), form))

    return of_tensors


def of_coded_pages(launch: Callable[..., None], scales: Scales) -> Callable[..., None]:
    """Adapts to launch(*inputs, K pages, V pages and their scales)."""
    form = PageFormat(Encoding.E4M3FN, PoolKind.SPLIT, PAGE_SIZE, 3, 24, 40, scales)

    def of_tensors(*tensors: Tensor) -> None:
        k, v, k_scale, v_scale = tensors[-4:]
        dtype = form.encoding.dtype
        launch(*tensors[:-4], LayerPages(k.view(dtype), v.view(dtype), form, k_scale, v_scale))

    return of_tensors
