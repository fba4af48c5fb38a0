"""The store for CPUs writes what the plain twins write, and leaves to them what is not as usual."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import PoolKind
from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopePairs, RopeTable, RowNorm, TokenPlaces
from rocm_attn.kernels.cpu import store
from rocm_attn.kernels.metadata.error_word import ERROR_WORD, NOT_FINITE
from rocm_attn.kernels.refs import cache, rope
from tests.amd.tolerances import assert_attention_close

TOKENS, HEADS, DIM, PAGE_SIZE = 5, 3, 16, 4
SLOTS = [5, 4, 19, 9, 0]  # of the last token, a pad: none


def pages_of(dtype: torch.dtype = torch.float32, kind: PoolKind = PoolKind.SPLIT) -> LayerPages:
    k, v = (torch.zeros(6, PAGE_SIZE, HEADS, DIM, dtype=dtype) for _ in range(2))
    return LayerPages.plain(k, k[..., :8] if kind is PoolKind.LATENT else v, kind=kind)


def rows_of(heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(TOKENS, heads, DIM, generator=torch.Generator().manual_seed(heads)).to(dtype)


def stored(
    put: Callable[..., None], k: Tensor, v: Tensor, slots: list[int], **terms: bool
) -> tuple[LayerPages, Tensor]:
    pages, counts = pages_of(k.dtype), torch.tensor([2, 4, 7, 0], dtype=torch.int32)
    put(k, v, torch.tensor(slots, dtype=torch.int32), counts, pages, **terms)
    return pages, counts


@pytest.mark.parametrize("null_page", [True, False])
@pytest.mark.parametrize("slots", [SLOTS, [5, 0, 19, 9, 0], [5, -1, 19, 9, -1], [0, 3, 2, 1, 0]], ids=str)
@pytest.mark.parametrize("strange", [1.0, float("nan"), float("inf"), 3e38], ids=str)
def test_pages_and_errors_are_those_of_the_twin(slots: list[int], strange: float, null_page: bool) -> None:
    k, v = rows_of(HEADS), rows_of(HEADS + 1)[:, 1:]
    v[2, 1, 3:6] = strange
    own, twin = (stored(put, k, v, slots, null_page=null_page) for put in (store.store_kv, cache.store_kv))
    assert torch.equal(own[0].k, twin[0].k)
    assert torch.equal(own[0].v, twin[0].v)
    assert torch.equal(own[1], twin[1])
    is_stored = null_page is False or slots[2] >= PAGE_SIZE
    assert bool(own[1][ERROR_WORD] & NOT_FINITE) == (is_stored and not math.isfinite(strange))


def test_pages_take_no_gradients() -> None:
    k, v = (rows_of(HEADS).requires_grad_() for _ in range(2))
    pages, _ = stored(store.store_kv, k, v, SLOTS, null_page=True)
    assert not pages.k.requires_grad
    assert torch.equal(pages.k.flatten(0, 1)[5], k[0])


def work_of(form: str, pairs: RopePairs = RopePairs.HALVES) -> QkvWork:
    chance = torch.Generator().manual_seed(7)
    frequencies = torch.rand(8 if form != "part" else 4, generator=chance)
    table = RopeTable.of_frequencies(frequencies, 32, pairs=pairs, at_end=form == "end")
    if form in ("part", "end"):
        table = RopeTable(table.cos_sin[:, : 2 * len(frequencies)].contiguous(), pairs, form == "end")
    norm = RowNorm(torch.rand(DIM, generator=chance), 1e-6, 1.0)
    return QkvWork(None if form == "norms" else table, *(norm if "norm" in form else None for _ in range(3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("adjacent", [True, False], ids=["adjacent", "apart"])
@pytest.mark.parametrize("form", ["rope", "part", "end", "norms", "rope_norms"])
@pytest.mark.parametrize("pairs", RopePairs)
def test_rows_are_turned_and_normalised_like_the_twins(
    form: str, pairs: RopePairs, adjacent: bool, dtype: torch.dtype
) -> None:
    given = rows_of(6 + 2 * HEADS, dtype)
    q, k, v = torch.split(given, [6, HEADS, HEADS], 1)
    if not adjacent:
        q, k = q.clone(), k.clone()
    positions = torch.tensor([0, 3, 31, 7, 0], dtype=torch.int32)
    results = []
    for put in (store.rope_store, rope.rope_store):
        pages, counts, q_out = pages_of(dtype), torch.tensor([2, 4, 7, 0], dtype=torch.int32), torch.empty_like(q)
        tokens = TokenPlaces(positions, torch.tensor(SLOTS, dtype=torch.int32), counts)
        put(Projected(q, k, v, q_out), tokens, work_of(form, pairs), pages, null_page=True)
        results.append((q_out, pages.k.flatten(0, 1)[SLOTS[:4]], pages.v.flatten(0, 1)[SLOTS[:4]], counts))
    own, twin = results
    for each, expected in zip(own[:3], twin[:3], strict=True):
        assert_attention_close(each, expected.double(), dtype)
    assert torch.equal(own[3], twin[3])
    assert torch.equal(given, rows_of(6 + 2 * HEADS, dtype)), "given rows stay as they are"


def test_q_may_be_turned_in_place_and_queries_alone() -> None:
    positions, work = torch.tensor([0, 3, 31, 7, 9], dtype=torch.int32), work_of("rope")
    q, expected = rows_of(6), torch.empty(TOKENS, 6, DIM)
    rope.rope_queries(q, expected, positions, work)
    store.rope_queries(q, q, positions, work)
    assert_attention_close(q, expected.double(), torch.float32)


def test_positions_without_a_line_give_nan() -> None:
    q = rows_of(6)
    store.rope_queries(q, q, torch.tensor([0, 32, 3, -1, 31], dtype=torch.int32), work_of("rope"))
    assert q.isnan().flatten(1).all(1).tolist() == [False, True, False, True, False]


def test_latent_rows_are_left_to_the_twin() -> None:
    results = []
    for put in (store.rope_store, rope.rope_store):
        row, q = rows_of(HEADS), rows_of(6)
        pages, counts = pages_of(kind=PoolKind.LATENT), torch.tensor([2, 4, 7, 0], dtype=torch.int32)
        tokens = TokenPlaces(torch.arange(TOKENS).int(), torch.tensor(SLOTS, dtype=torch.int32), counts)
        put(Projected(q, row, row[..., :8], q), tokens, work_of("end"), pages, null_page=True)
        results.append((q, pages.k))
    assert all(torch.equal(own, twin) for own, twin in zip(*results, strict=True))
