"""Publish, table updates and the store: kernels and torch twins against plain Python."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.store import launch_store_kv
from rocm_attn.kernels.metadata.device_inputs import launch_device_inputs
from rocm_attn.kernels.metadata.error_word import (
    LENGTH_BEYOND_BOUND,
    NOT_FINITE,
    SHARED_TOKEN,
    TOKEN_WITHOUT_PAGE,
    UNSTORED_TOKEN,
)
from rocm_attn.kernels.metadata.given_inputs import GivenInputs
from rocm_attn.kernels.metadata.publish import launch_publish
from rocm_attn.kernels.metadata.slot_layout import ECHO, ECHOED_STEP, NO_ECHO, TAKEN_BY_GRAPH, WRONG_STEP
from rocm_attn.kernels.metadata.step_tensors import Pads, StepTensors
from rocm_attn.kernels.metadata.table_update import launch_table_update
from rocm_attn.kernels.metadata.take_inputs import launch_take_inputs
from rocm_attn.kernels.refs import cache as cache_refs
from rocm_attn.kernels.refs import metadata as refs
from tests.amd.kernels.attention_cases import GARBAGE, garbage, ints
from tests.amd.vectorised import vectorised_keys, vectorised_values

Launch = Callable[..., None]


def published(pads: Pads, *tensors: Tensor) -> StepTensors:
    """A step of the tensors that are published."""
    names = ("counts", "row_of_seq", "kv_len", "q_len", "prefix_len", "group_end", "token_ids")
    return StepTensors.of(tensors[0][:0], pads, **dict(zip(names, tensors, strict=True)))


def placed(*tensors: Tensor) -> StepTensors:
    """A step of the tensors that a caller's inputs replace."""
    named = dict(zip(("counts", "kv_len", "q_len", "token_ids"), tensors, strict=True))
    return StepTensors.of(tensors[0][:0], **named)


@pytest.mark.fast
@pytest.mark.parametrize("publish", [launch_publish, refs.publish])
@pytest.mark.parametrize("with_prefixes", [True, False])
@pytest.mark.parametrize("with_ids", [True, False])
def test_publish_writes_every_entry_pads_and_sequences_without_a_token_included(
    publish: Launch, with_ids: bool, with_prefixes: bool, kernel_device: torch.device
) -> None:
    rows, kv_len, q_len, ids = [4, 2, 9], [7, 0, 300], [2, 0, 4], [11, 12, 13, 14, 15, 16]
    words = [3, 6, 41, int(with_ids), 40, NO_ECHO, GARBAGE, GARBAGE, *rows, *kv_len, *q_len, *(ids if with_ids else [])]
    prefixes = garbage(5 * with_prefixes, kernel_device), garbage(5 * with_prefixes, kernel_device)
    words += [16, 16, 0, 2, 2, 3] if with_prefixes else []
    slot = torch.tensor(words + [GARBAGE] * 9, dtype=torch.int32, pin_memory=kernel_device.type == "cuda")
    counts, token_ids = garbage(4, kernel_device), garbage(300, kernel_device)
    seqs = garbage(5, kernel_device), garbage(5, kernel_device), garbage(5, kernel_device)
    publish(slot, counts, to=published(Pads(1, 0), counts, *seqs, *prefixes, token_ids))
    assert counts.tolist() == [3, 6, 41, 0]
    assert [x.tolist() for x in seqs] == [[*rows, 0, 0], [7, 1, 300, 1, 1], [*q_len, 0, 0]]
    assert token_ids.tolist() == (ids if with_ids else [0] * 6) + [0] * 294
    assert [x.tolist() for x in prefixes] == ([[16, 16, 0, 0, 0], [2, 2, 3, 0, 0]] if with_prefixes else [[], []])


@pytest.mark.fast
@pytest.mark.parametrize("publish", [launch_publish, refs.publish])
@pytest.mark.parametrize("same", [True, False], ids=["same counts", "other counts"])
@pytest.mark.parametrize(("error_word", "number"), [(0, 40), (5, 40), (-1, 40), (0, 39), (5, 0)])
def test_publish_says_how_the_step_before_went(
    publish: Launch, same: bool, error_word: int, number: int, kernel_device: torch.device
) -> None:
    """Only then does it overwrite its counts. With 700 sequences, one program of three does it."""
    words = [1, 1, 41, 0, 40, NO_ECHO, GARBAGE, GARBAGE, 3, 7, 1]
    slot = torch.tensor(words, dtype=torch.int32, pin_memory=kernel_device.type == "cuda")
    before = ints([GARBAGE, GARBAGE, number, error_word], kernel_device)
    counts = before if same else garbage(4, kernel_device)
    seqs = garbage(700, kernel_device), garbage(700, kernel_device), garbage(700, kernel_device)
    nothing = garbage(0, kernel_device)
    publish(slot, before, to=published(Pads(0, 1), counts, *seqs, nothing, nothing, garbage(700, kernel_device)))
    assert counts.tolist() == [1, 1, 41, 0]
    if not same:
        assert before.tolist() == [GARBAGE, GARBAGE, number, error_word]
    words[ECHO], words[ECHOED_STEP] = error_word if number == 40 else WRONG_STEP, number
    assert slot.tolist() == words


def _due(step: int, runs_before: int, mark: int = TAKEN_BY_GRAPH) -> list[int]:
    """Returns a slot of three sequences with six tokens, and their prefixes."""
    header = [3, 6, step, 1, step - 1, mark, GARBAGE, runs_before]
    return [*header, 4, 2, 9 + step, 7, 1, 300, 2, 1, 3, *range(11, 17), 16, 16, 0, 2, 2, 3, *[GARBAGE] * 7]


@pytest.mark.fast
@pytest.mark.parametrize("take", [launch_take_inputs, refs.take_inputs])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("with_prefixes", [True, False])
@pytest.mark.parametrize(
    "other", [(42, 8, TAKEN_BY_GRAPH), (40, 6, 0), (40, 7, NO_ECHO)], ids=["of the next run", "taken", "published"]
)
def test_a_run_takes_the_slot_that_is_due_in_it(
    take: Launch, at: int, with_prefixes: bool, other: tuple[int, int, int], kernel_device: torch.device
) -> None:
    """It leaves the other slot unchanged."""
    words = [_due(*other), _due(*other)]
    words[at] = _due(41, 7)
    slots = torch.tensor(words, dtype=torch.int32, pin_memory=kernel_device.type == "cuda")
    counts, runs = ints([GARBAGE, GARBAGE, 40, 5], kernel_device), ints([7], kernel_device)
    seqs = garbage(5, kernel_device), garbage(5, kernel_device), garbage(5, kernel_device)
    prefixes = garbage(5 * with_prefixes, kernel_device), garbage(5 * with_prefixes, kernel_device)
    token_ids = garbage(300, kernel_device)
    take(slots, runs, to=published(Pads(1, 0), counts, *seqs, *prefixes, token_ids))
    assert runs.tolist() == [8]
    assert counts.tolist() == [3, 6, 41, 0]
    assert [x.tolist() for x in seqs] == [[4, 2, 50, 0, 0], [7, 1, 300, 1, 1], [2, 1, 3, 0, 0]]
    assert token_ids.tolist() == [*range(11, 17)] + [0] * 294
    assert [x.tolist() for x in prefixes] == ([[16, 16, 0, 0, 0], [2, 2, 3, 0, 0]] if with_prefixes else [[], []])
    words[at][ECHO], words[at][ECHOED_STEP] = 5, 40
    assert slots.tolist() == words


@pytest.mark.parametrize("take", [launch_take_inputs, refs.take_inputs])
@pytest.mark.parametrize(("num_seqs", "num_tokens"), [(1025, 1), (1, 1025)])
def test_a_step_of_more_than_one_program_is_taken_by_none(
    take: Launch, num_seqs: int, num_tokens: int, kernel_device: torch.device
) -> None:
    slots, runs = torch.zeros(2, 4096, dtype=torch.int32), ints([7], kernel_device)
    written = [garbage(size, kernel_device) for size in (4, *[num_seqs] * 3, 0, 0, num_tokens)]
    with pytest.raises(AssertionError, match="no such step is taken by its graph"):
        take(slots, runs, to=published(Pads(1, 0), *written))


@pytest.mark.parametrize("take", [launch_take_inputs, refs.take_inputs])
def test_a_run_for_which_no_slot_is_due_changes_nothing_but_the_count(
    take: Launch, kernel_device: torch.device
) -> None:
    """The largest number of runs is followed by 0."""
    words = [_due(41, 7), _due(42, 2**31 - 1, NO_ECHO)]
    slots = torch.tensor(words, dtype=torch.int32, pin_memory=kernel_device.type == "cuda")
    runs = ints([2**31 - 1], kernel_device)
    written = [garbage(size, kernel_device) for size in (4, 5, 5, 5, 5, 5, 5)]
    take(slots, runs, to=published(Pads(1, 0), *written))
    assert runs.tolist() == [0]
    assert slots.tolist() == words
    assert all((tensor == GARBAGE).all() for tensor in written)


@dataclass(frozen=True)
class Given:
    """Lengths on the device, each with its bound, and the amount of padding.

    seqs:     (kv_len, bound, q_len, bound, floor, stored) of each sequence
    with_ids: true if there are token ids
    ahead:    number of tokens that the lengths on the device leave out
    """

    seqs: list[tuple[int, int, int, int, int, int]]
    seq_pads: int
    token_pads: int
    with_ids: bool
    ahead: int = 0


@st.composite
def given_lengths(draw: st.DrawFn) -> Given:
    any_value = st.integers(-3, 12) | st.integers(-(2**31), 2**31 - 1)
    bounds = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=9))
    stored = st.integers(0, 12) | st.just(2**31 - 1)
    seqs = [
        (draw(any_value), kv + q, draw(any_value), q, draw(st.integers(0, kv + q)), draw(stored)) for kv, q in bounds
    ]
    return Given(seqs, draw(st.integers(0, 3)), draw(st.integers(0, 3)), draw(st.booleans()), draw(st.integers(-2, 9)))


def _wrapped(value: int) -> int:
    """Returns the value as int32 holds it."""
    return (value + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize("place", [launch_device_inputs, refs.device_inputs])
@settings(max_examples=25)
@given(case=given_lengths())
def test_device_inputs_are_placed_within_their_bounds(place: Launch, kernel_device: torch.device, case: Given) -> None:
    kv_len, kv_bound, q_len, q_bound, first_writable, stored = (list(column) for column in zip(*case.seqs, strict=True))
    n, most = len(case.seqs), sum(q_bound)
    words = [n, most, 41, 0, 40, 0, 40, 0, *range(1, n + 1), *kv_bound, *q_bound]
    slot = torch.tensor(words, dtype=torch.int32, pin_memory=kernel_device.type == "cuda")
    ids = list(range(100, 100 + most)) if case.with_ids else []
    sources = [ints(values, kernel_device) for values in (kv_len, q_len, ids, first_writable, stored)]
    counts = ints([n, most, 41, 0], kernel_device)
    lengths = [garbage(n + case.seq_pads, kernel_device) for _ in range(2)]
    token_ids = garbage(max(1, most + case.token_pads), kernel_device)
    place(slot, GivenInputs._make((*sources, case.ahead)), placed(counts, *lengths, token_ids))

    given = kv_len
    kv_len = [_wrapped(length + case.ahead) for length in given]
    new = [min(max(q, 0), bound) for q, bound in zip(q_len, q_bound, strict=True)]
    kept = [min(max(kv, q), bound) for kv, q, bound in zip(kv_len, new, kv_bound, strict=True)]
    error = 0 if (new, kept) == (q_len, kv_len) else LENGTH_BEYOND_BOUND
    for seq in range(n):
        if kept[seq] - new[seq] > stored[seq]:
            error |= UNSTORED_TOKEN
            kept[seq] = stored[seq] + new[seq]
        if new[seq] and kept[seq] - new[seq] < first_writable[seq]:
            error |= SHARED_TOKEN
            kept[seq] = min(first_writable[seq] + new[seq], kv_bound[seq])
            new[seq] = min(new[seq], kept[seq] - first_writable[seq])
        assert not new[seq] or first_writable[seq] <= kept[seq] - new[seq]
        assert kept[seq] <= kv_bound[seq]
    pads = [GARBAGE] * case.seq_pads
    assert [x.tolist() for x in lengths] == [kept + pads, new + pads]
    assert counts.tolist() == [n, sum(new), 41, error]
    live = ids[: sum(new)]
    assert token_ids.tolist() == live + [0] * (len(token_ids) - len(live))
    assert [x.tolist() for x in sources] == [given, q_len, ids, first_writable, stored]
    assert slot.tolist() == words


@pytest.mark.parametrize("place", [launch_device_inputs, refs.device_inputs])
def test_device_inputs_of_many_sequences_are_placed_whole(place: Launch, kernel_device: torch.device) -> None:
    """There are more sequences than a program reads in one step, and more tokens than one writes."""
    n = 1100
    kv_len, q_len = torch.arange(n) % 7 + 2, torch.arange(n) % 3
    words = torch.cat([torch.tensor([n, 2 * n, 41, 0, 40, 0, 40, 0]), torch.arange(n), kv_len + 1, torch.full((n,), 2)])
    slot = words.to(torch.int32)
    slot = slot.pin_memory() if kernel_device.type == "cuda" else slot
    ids = torch.arange(2 * n, dtype=torch.int32, device=kernel_device) + 7
    counts, token_ids = ints([n, 2 * n, 41, 0], kernel_device), garbage(2 * n + 9, kernel_device)
    lengths = [garbage(n, kernel_device) for _ in range(2)]
    sources = [x.to(kernel_device, torch.int32) for x in (kv_len, q_len)]
    given = GivenInputs(sources[0], sources[1], ids, torch.zeros_like(sources[0]), sources[0])
    place(slot, given, placed(counts, *lengths, token_ids))
    total = int(q_len.sum())
    assert counts.tolist() == [n, total, 41, 0]
    assert all(torch.equal(placed, source) for placed, source in zip(lengths, sources, strict=True))
    assert torch.equal(token_ids[:total], ids[:total])
    assert not token_ids[total:].any()


@pytest.mark.parametrize("update", [launch_table_update, refs.table_update])
def test_table_updates_change_their_cells_and_never_row_zero(update: Launch, kernel_device: torch.device) -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10).to(kernel_device)
    before = table.clone()
    triples = [(1, 0, 77), (3, 9, 78), (0, 3, 79), (1, 0, 77)]
    flat = torch.tensor([word for triple in triples for word in triple], dtype=torch.int32)
    for _ in range(2):
        update(flat.to(kernel_device), table, num_updates=4)
    before[1, 0], before[3, 9] = 77, 78
    assert torch.equal(table, before)


def test_a_large_table_update_is_applied_whole(kernel_device: torch.device) -> None:
    cells = torch.randperm(64 * 40)[:1000]
    triples = torch.stack([1 + cells // 40, cells % 40, torch.arange(1000)], 1).to(torch.int32)
    tables = [torch.zeros(65, 40, dtype=torch.int32, device=kernel_device) for _ in range(2)]
    launch_table_update(triples.view(-1).to(kernel_device), tables[0], num_updates=1000)
    refs.table_update(triples.view(-1).to(kernel_device), tables[1], num_updates=1000)
    assert torch.equal(*tables)


@pytest.mark.fast
@pytest.mark.parametrize("store", [launch_store_kv, cache_refs.store_kv])
@pytest.mark.parametrize(("heads", "k_dim", "v_dim", "page_size"), [(2, 16, 16, 4), (3, 80, 24, 1), (1, 192, 128, 5)])
@pytest.mark.parametrize("heads_first", [False, True])
def test_the_store_writes_live_tokens_and_drops_all_others(
    store: Launch, heads: int, k_dim: int, v_dim: int, page_size: int, heads_first: bool, kernel_device: torch.device
) -> None:
    def pages(dim: int) -> Tensor:
        if heads_first:  # HND memory seen as [pages, page_size, heads, dim]
            return torch.full((6, heads, page_size, dim), 9.0, device=kernel_device).transpose(1, 2)
        return torch.full((6, page_size, heads, dim), 9.0, device=kernel_device)

    def rows(dim: int) -> Tensor:
        values = torch.randn(7, heads, dim + 8, device=kernel_device)[..., :dim]
        values[5:] = float("nan")  # hidden states of pads may be anything
        return values

    k_pages, v_pages, k, v = pages(k_dim), pages(v_dim), rows(k_dim), rows(v_dim)
    for storage in (k_pages, v_pages):
        storage[0] = 0.0
    # Token 3 points to page 0, as a sequence without a page would; tokens 5 and 6 are pads.
    slots = [page_size, 3 * page_size + page_size - 1, 2 * page_size, page_size - 1, 5 * page_size, 0, 4 * page_size]
    want_k, want_v = k_pages.clone(), v_pages.clone()
    for token in (0, 1, 2, 4):
        want_k[slots[token] // page_size, slots[token] % page_size] = k[token]
        want_v[slots[token] // page_size, slots[token] % page_size] = v[token]
    counts = ints([2, 5, 1, 0], kernel_device)
    store(k, v, ints(slots, kernel_device), counts, LayerPages.plain(k_pages, v_pages))
    assert torch.equal(k_pages, want_k)
    assert torch.equal(v_pages, want_v)


@pytest.mark.fast
@pytest.mark.parametrize("store", [launch_store_kv, cache_refs.store_kv])
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("token", [0, 2, 3])
def test_what_is_no_number_is_stored_as_zero_and_reported(
    store: Launch, side: str, value: float, dtype: torch.dtype, token: int, kernel_device: torch.device
) -> None:
    """Token 2 points to page 0 and token 3 is a pad: their values are dropped, and no fault."""
    rows = {name: torch.full((4, 3, 24), 2.0, dtype=dtype, device=kernel_device) for name in ("k", "v")}
    rows["k"][1, 0, 0] = torch.finfo(dtype).max
    pages = [torch.zeros(3, 4, 3, 24, dtype=dtype, device=kernel_device) for _ in range(2)]
    want = [rows[name].clone() for name in ("k", "v")]
    rows[side][token, 2, 23], want[side == "v"][token, 2, 23] = value, 0.0
    counts = ints([1, 3, 1, TOKEN_WITHOUT_PAGE], kernel_device)
    store(rows["k"], rows["v"], ints([4, 9, 3, 10], kernel_device), counts, LayerPages.plain(*pages))
    for stored, wanted in zip(pages, want, strict=True):
        assert torch.equal(stored[1, 0], wanted[0])
        assert torch.equal(stored[2, 1], wanted[1])
        assert int(stored.count_nonzero()) == int(wanted[:2].count_nonzero())
    assert counts.tolist() == [1, 3, 1, TOKEN_WITHOUT_PAGE | (NOT_FINITE if token == 0 else 0)]


@pytest.mark.fast
@pytest.mark.parametrize("store", [launch_store_kv, cache_refs.store_kv])
@pytest.mark.parametrize(("heads", "k_dim", "v_dim", "page_size"), [(2, 16, 16, 4), (3, 80, 24, 8), (1, 192, 128, 16)])
@pytest.mark.parametrize("x", [4, 8])
def test_a_vectorised_store_writes_what_a_linear_one_writes(
    store: Launch, heads: int, k_dim: int, v_dim: int, page_size: int, x: int, kernel_device: torch.device
) -> None:
    page_size = max(page_size, x)
    linear = [torch.full((6, page_size, heads, dim), 9.0, device=kernel_device) for dim in (k_dim, v_dim)]
    for pages in linear:
        pages[0] = 0.0
    vectorised = [vectorised_keys(linear[0], x), vectorised_values(linear[1], x)]
    k, v = (torch.randn(7, heads, dim + 8, device=kernel_device)[..., :dim] for dim in (k_dim, v_dim))
    slots = [page_size, 3 * page_size + page_size - 1, 2 * page_size + 2, page_size - 1, 5 * page_size, 0, 4]
    counts = ints([2, 5, 1, 0], kernel_device)
    for sides in (linear, vectorised):
        store(k, v, ints(slots, kernel_device), counts, LayerPages.plain(*sides))
    assert torch.equal(linear[0][2, 2], k[2])
    assert torch.equal(vectorised[0], vectorised_keys(linear[0], x))
    assert torch.equal(vectorised[1], vectorised_values(linear[1], x))
