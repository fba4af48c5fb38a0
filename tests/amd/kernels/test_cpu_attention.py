"""Attention for CPUs against a float64 reference and the plain twins, with NaN in everything that may not be read."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW
from rocm_attn.kernels.cpu import attention
from rocm_attn.kernels.launch import observe_launches
from rocm_attn.kernels.refs import attention as refs
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
