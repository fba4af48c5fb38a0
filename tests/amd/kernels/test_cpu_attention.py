"""Attention and the store for CPUs against float64 and the plain twins, with NaN in everything that may not be read."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import PoolKind
from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopePairs, RopeTable, RowNorm, TokenPlaces
from rocm_attn.kernels.cpu import attention, store
from rocm_attn.kernels.launch import observe_launches
from rocm_attn.kernels.metadata.error_word import ERROR_WORD, NOT_FINITE
from rocm_attn.kernels.refs import attention as refs
from rocm_attn.kernels.refs import cache, rope
from tests.amd.kernels.attention_cases import UNTOUCHED, Case, Tensors, assert_served, assert_serves, build
from tests.amd.tolerances import assert_attention_close

CPU = torch.device("cpu")
KV_LEN = [33, 0, 1, 16, 70, 15]
DECODES = Case(kv_len=KV_LEN, q_len=[1] * len(KV_LEN))
EXTENDS = Case(kv_len=[60, 0, 17, 33, 1, 30, 12], q_len=[21, 0, 17, 2, 1, 1, 0], tail=3)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Changes of both cases.
FORMS: Mapping[str, dict[str, object]] = {
    "plain": {},
    "mha": {"heads": (2, 2)},
    "gqa_3": {"heads": (9, 3), "page_size": 5},
    "mqa_71": {"heads": (71, 1), "dims": (32, 32)},
    "pages_of_1": {"page_size": 1, "dims": (40, 40)},
    "pages_of_128": {"page_size": 128, "dims": (128, 128)},
    "dim_1": {"heads": (1, 1), "dims": (1, 1), "page_size": 2},
    "window": {"window_left": 9},
    "window_of_one": {"window_left": 0, "page_size": 3},
    "sinks": {"sinks": True, "heads": (6, 2)},
    "window_sinks": {"sinks": True, "window_left": 20, "page_size": 7},
    "both_sides": {"window_left": 20, "window_right": 9, "page_size": 7},
    "few_later": {"window_right": 2, "sinks": True},
    "window_and_all_later": {"window_left": 4, "window_right": UNLIMITED_WINDOW},
}


def run_decode(tensors: Tensors) -> None:
    """Finds the keys of a step and attends."""
    table, form = tensors.table[tensors.row_of_seq], tensors.pages.format
    most = form.page_size * table.shape[1]
    words = torch.full((attention.decode_words(tensors.num_seqs, most),), 0x7F7F7F7F, dtype=torch.int32)
    seen = tensors.scores.visibility
    attention.find_keys(tensors.queries, words, page_size=form.page_size, table_width=table.shape[1], visibility=seen)
    attention.paged_decode(tensors.args(words), table, scores=tensors.scores)


def run_extend(tensors: Tensors) -> None:
    attention.paged_extend(tensors.args(), scores=tensors.scores)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_decode_equals_the_reference(form: dict[str, object], dtype: torch.dtype) -> None:
    assert_serves(run_decode, replace(DECODES, dtype=dtype, **form), CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", {**FORMS, "whole": {"window_right": UNLIMITED_WINDOW}}.values(), ids=[*FORMS, "whole"])
def test_extend_equals_the_reference(form: dict[str, object], dtype: torch.dtype) -> None:
    assert_serves(run_extend, replace(EXTENDS, dtype=dtype, **form), CPU)  # type: ignore[arg-type]


@st.composite
def _any_windows(draw: st.DrawFn) -> Case:
    """A step over pages of any size, whose tokens see any number of keys on each side of theirs."""
    q_len = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    sides = st.sampled_from([UNLIMITED_WINDOW, 0, 1, 3, 16, 33, 2**31 - 2])
    return Case(
        kv_len=[new + draw(st.integers(0, 50)) for new in q_len],
        q_len=q_len,
        heads=draw(st.sampled_from([(1, 1), (4, 2)])),
        dims=(16, 16),
        page_size=draw(st.sampled_from([1, 3, 16, 64])),
        tail=draw(st.integers(0, 3)),
        window_left=draw(sides),
        window_right=draw(sides),
        sinks=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(_any_windows())
def test_any_window_over_any_pages_is_that_of_the_brute_force_reference(case: Case) -> None:
    """Keys that no token sees are NaN in the pages."""
    assert_serves(run_extend, case, CPU)
    assert_serves(lambda tensors: refs.paged_extend(tensors.args(), scores=tensors.scores), case, CPU)


@pytest.mark.parametrize("window_left", [UNLIMITED_WINDOW, 5])
def test_sequences_of_equal_lengths_fill_their_tiles(window_left: int) -> None:
    assert_serves(run_extend, Case(kv_len=[40, 64, 32], q_len=[32, 32, 32], window_left=window_left), CPU)


@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_every_length_around_pages_is_right(page_size: int) -> None:
    kv_len = [*range(6), 13, 14, 15, 16, 17, 31, 32, 33, 47, 48, 49]
    case = Case(kv_len=kv_len, q_len=[1] * len(kv_len), heads=(1, 1), dims=(16, 16), page_size=page_size)
    tensors = build(case, CPU)
    run_decode(tensors)
    assert_served(tensors)
    for new in (2, 16, 17, 33):
        assert_serves(run_extend, replace(case, q_len=[min(new, length) for length in kv_len]), CPU)


def test_decode_leaves_tokens_of_other_sequences_unchanged() -> None:
    tensors = build(replace(DECODES, kv_len=[*KV_LEN, 40, 5], q_len=[*DECODES.q_len, 3, 0], tail=2), CPU)
    run_decode(tensors)
    num = len(KV_LEN)
    assert_attention_close(tensors.out[:num], tensors.reference[:num], torch.float32)
    assert (tensors.out[num:] == UNTOUCHED).all()
    assert (tensors.lse[num:] == UNTOUCHED).all()


@pytest.mark.parametrize(("kv_len", "q_len"), [([], []), ([0, 0], [0, 0]), ([9, 5], [0, 0])])
def test_a_step_without_tokens_is_all_zeros(kv_len: list[int], q_len: list[int]) -> None:
    tensors = build(Case(kv_len=kv_len, q_len=q_len, tail=4), CPU)
    run_extend(tensors)
    assert not tensors.out.any()
    assert (tensors.lse == float("-inf")).all()


def test_tokens_before_their_first_key_see_nothing() -> None:
    """An engine's layer that is not causal may have fewer keys than new tokens: EXTENDS with two keys left out."""
    tensors = build(EXTENDS, CPU)
    tensors.kv_len[2] = 5
    plain = build(EXTENDS, CPU)
    plain.kv_len[2] = 5
    run_extend(tensors)
    refs.paged_extend(plain.args(), scores=plain.scores)
    assert torch.equal(tensors.out, plain.out)
    assert torch.equal(tensors.lse, plain.lse)


def test_large_steps_are_cut_into_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_GROUP_ELEMENTS", 1 << 14)
    assert_serves(run_extend, EXTENDS, CPU)


def test_a_recorder_sees_one_launch_of_each() -> None:
    """So a replay reads the lengths of its own step."""
    seen: list[object] = []
    with observe_launches(seen.append):
        run_decode(build(DECODES, CPU))
        run_extend(build(EXTENDS, CPU))
    assert len(seen) == 3


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
