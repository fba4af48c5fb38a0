"""Features that an engine may ask for, and refusals: causality, masks, short KV, strides, tails, inference mode."""

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.capture.graphs import recorder_for
from rocm_attn.errors import (
    BadBatch,
    BadProblem,
    BadSetting,
    BadTensor,
    CapacityExceeded,
    DeviceFault,
    NeverFits,
    Unsupported,
    WrongState,
)
from rocm_attn.external import Bounds, ExternalAttention, ExternalOptions, LayerSource, LogAndCount
from rocm_attn.machine.target import known_target
from rocm_attn.paging.adopted import CsrSource, TableSource
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import UNLIMITED_WINDOW, PoolKind
from rocm_attn.step.external_step import (
    ONE_EACH,
    BoolCells,
    Boundaries,
    Causality,
    DeviceSpans,
    ExternalStep,
    NewLengths,
    OneEach,
)
from rocm_attn.step.head_weights import HeadWeights
from tests.amd.external.engines import DIM, KV_HEADS, Q_HEADS, SCALE, VLLM
from tests.amd.external.filled import BOUNDS, PAGE, Cells, Filled, near, problem
from tests.amd.integrations.oracle import Scores, attention
from tests.amd.runtime.interrupts import OutOfMemory, every_line


@pytest.mark.fast(interpreted=0)
def test_causality_may_change_from_step_to_step(device: torch.device, provider: str) -> None:
    both = (Causality.OF_LAYERS, Causality.NOT_CAUSAL)
    filled = Filled(device, provider, options=ExternalOptions(provider=provider, causalities=both))
    q_len, q = [3, 9, 2, 1], filled.rows(15, Q_HEADS, DIM)
    for causality in (*both, *both):
        found = filled.attend(q_len, filled.step(q_len, causality=causality), q)
        filled.assert_right(q_len, found, q, causal=causality is Causality.OF_LAYERS)
    filled.attention.check_device()
    with pytest.raises(WrongState, match="no kernels were chosen for steps with CAUSAL"):
        filled.attention.begin(filled.step(q_len, causality=Causality.CAUSAL))


@pytest.mark.fast(interpreted=0)
def test_a_window_has_two_sides_without_causality(device: torch.device, provider: str) -> None:
    both = (Causality.OF_LAYERS, Causality.NOT_CAUSAL)
    filled = Filled(device, provider, options=ExternalOptions(provider=provider, causalities=both), window_left=3)
    q_len, q = [3, 9, 2, 1], filled.rows(15, Q_HEADS, DIM)
    for causality, later in ((Causality.OF_LAYERS, 0), (Causality.NOT_CAUSAL, 3), (Causality.OF_LAYERS, 0)):
        found = filled.attend(q_len, filled.step(q_len, causality=causality), q)
        shown = filled.cells(q_len, partial(near, 3, later))
        filled.assert_right(q_len, found, q, shown=shown)
    filled.attention.check_device()


def test_chunks_are_refused_without_causality() -> None:
    with pytest.raises(BadProblem, match="chunks need window_right 0"):
        ExternalAttention(
            [LayerSource(problem(chunk=8))],
            TableSource(torch.zeros(4, 4, dtype=torch.int32)),
            device="cpu",
            bounds=BOUNDS,
            options=ExternalOptions(provider="torch", causalities=[Causality.NOT_CAUSAL]),
        )


def test_queries_may_outnumber_keys_where_attention_is_not_causal(device: torch.device, provider: str) -> None:
    """Parts of a context on several ranks, or cross-attention: a sequence may have no key at all."""
    options = ExternalOptions(provider=provider, short_kv=True)
    filled = Filled(device, provider, options=options, window_right=UNLIMITED_WINDOW)
    q_len, kv_len, q = [9, 3, 2, 4], [5, 33, 0, 1], filled.rows(18, Q_HEADS, DIM)
    found = filled.attend(q_len, filled.step(q_len, kv_len), q)
    filled.assert_right(q_len, found, q, causal=False, kv_len=kv_len)
    filled.attention.check_device()


@pytest.mark.fast(interpreted=1)
@pytest.mark.parametrize("deterministic", [False, True])
def test_queries_may_outnumber_latents(deterministic: bool, device: torch.device, provider: str) -> None:
    """Such rows counted as those of a sequence that lost its pages, and received zeros."""
    options = ExternalOptions(provider=provider, short_kv=True, deterministic=deterministic)
    table = torch.tensor([[1, 0], [2, 3]], dtype=torch.int32, device=device)
    latents = problem(num_kv_heads=1, head_dim=24, v_head_dim=16, window_right=UNLIMITED_WINDOW, pool=PoolKind.LATENT)
    made = ExternalAttention(
        [LayerSource(latents)], TableSource(table), device=device, bounds=replace(BOUNDS, kv_len=32), options=options
    )
    random = torch.Generator().manual_seed(0)
    k, q = (torch.randn(shape, generator=random) for shape in ((BOUNDS.num_pages, PAGE, 1, 24), (16, Q_HEADS, 24)))
    pages = k.to(device)
    made.pages.bind(0, pages, pages[..., :16])
    kv_len, q_len = (torch.tensor(each, device=device) for each in ([5, 20], [12, 4]))
    made.begin(ExternalStep(2, 2, 16, kv_len, NewLengths(q_len), None, 4, 12, 32))
    made.fill()
    out = torch.empty(16, Q_HEADS, 16, device=device)
    made.layers.attend(0, q.to(device), out)
    for rows, keys in ((slice(12), k[1, :5]), (slice(12, 16), torch.cat([k[2], k[3, :4]]))):
        q_rows, k_rows = q[rows].double().numpy(), keys.double().numpy()
        want, _ = attention(q_rows, k_rows, k_rows[..., :16], Scores(SCALE, causal=False))
        assert np.allclose(out[rows].cpu(), want, atol=2e-5)


@pytest.mark.fast(8, interpreted=0)
@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("q_len", [[0, 0, 1, 0], [1, 0, 1, 0]])
@pytest.mark.parametrize("masked", [False, True])
def test_a_sequence_without_a_new_token_may_come_before_others_with_one(
    masked: bool, q_len: list[int], most: int, device: torch.device, provider: str
) -> None:
    """The step is padded to one token for each sequence, or has a single one."""
    filled, tokens = Filled(device, provider, custom_mask=masked), 1 if sum(q_len) == 1 else 4
    q, starts = filled.rows(tokens, Q_HEADS, DIM), torch.tensor([0, *itertools.accumulate(q_len)], device=device)
    lengths = torch.tensor(filled.kv_len, device=device)
    step = ExternalStep.extend(starts, lengths, num_tokens=tokens, max_q_len=most, max_kv_len=64)
    if masked:
        step = replace(step, mask=DeviceSpans(torch.empty(0, 3, dtype=torch.int32, device=device)))
    filled.assert_right(q_len, filled.attend(q_len, step, q), q)
    filled.attention.check_device()


@pytest.mark.fast(interpreted=0)
def test_queries_that_outnumber_keys_are_cut_where_attention_is_causal(device: torch.device, provider: str) -> None:
    filled = Filled(device, provider)
    filled.attend([9], filled.step([9]), filled.rows(9, Q_HEADS, DIM))
    with pytest.raises(Exception, match="a length on the device was outside"):
        filled.attention.check_device()


@pytest.mark.fast(interpreted=1)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_mask_of_bytes_says_what_tokens_see(dtype: torch.dtype, device: torch.device, provider: str) -> None:
    filled = Filled(device, provider, custom_mask=True)
    q_len, q = [3, 4, 2, 1], filled.rows(10, Q_HEADS, DIM)
    shown = filled.cells(q_len, lambda at, keys: filled.random.random((len(at), len(keys))) < 0.4)
    cells = torch.from_numpy(np.concatenate([cell.reshape(-1) for cell in shown])).to(device, dtype)
    positions = torch.zeros(10, dtype=torch.int64, device=device)
    found = filled.attend(q_len, filled.step(q_len, mask=BoolCells(cells, positions)), q)
    filled.assert_right(q_len, found, q, shown=shown)
    filled.attention.check_device()
    plain = Filled(device, provider)
    with pytest.raises(WrongState, match="no layer uses one; build with problems of custom_mask"):
        plain.attention.begin(plain.step(q_len, mask=BoolCells(cells, positions)))


@pytest.mark.fast(interpreted=1)
def test_a_mask_of_bytes_counts_windows_from_its_own_positions(device: torch.device, provider: str) -> None:
    """In the first masked step too, after which the windows of an earlier one are in their places."""
    filled = Filled(device, provider, custom_mask=True, window_left=7)
    q_len, q = [3, 4, 2, 1], filled.rows(10, Q_HEADS, DIM)
    given = filled.cells(q_len, partial(near, 64, 0))
    cells = torch.from_numpy(np.concatenate([each.reshape(-1) for each in given])).to(device)
    positions = torch.from_numpy(np.concatenate(filled.cells(q_len, lambda at, keys: at))[:, 0]).to(device)
    found = filled.attend(q_len, filled.step(q_len, mask=BoolCells(cells, positions)), q)
    filled.assert_right(q_len, found, q, shown=filled.cells(q_len, partial(near, 7, 0)))


# Sequence, first key and end: one from before the new tokens on, one to past its sequence, one of no sequence.
SPANS = [[0, 3, 5], [1, 20, 31], [2, 60, 99], [7, 0, 9], [-1, 0, 0]]


@pytest.mark.fast(interpreted=1)
@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize("mask_cells", [False, True])
def test_tokens_of_a_span_see_each_other(mask_cells: bool, passes: bool, device: torch.device, provider: str) -> None:
    """Then those of the next step see what its cells say."""
    options = ExternalOptions(provider=provider, mask_cells=mask_cells)
    filled = Filled(device, provider, options=options, custom_mask=True, window_left=5, spans_pass_window=passes)
    q_len, q = [3, 8, 5, 1], filled.rows(17, Q_HEADS, DIM)
    spans = DeviceSpans(torch.tensor(SPANS, dtype=torch.int32, device=device))
    for mask, of_seq in ((spans, {row[0]: row[1:] for row in SPANS}), (DeviceSpans(spans.of_step[:0]), {})):
        found, shown = filled.attend(q_len, filled.step(q_len, mask=mask), q), list[Cells]()
        for seq, (new, length) in enumerate(zip(q_len, filled.kv_len, strict=True)):
            keys, places = np.arange(length), np.arange(length - new, length)[:, None]
            begin, end = of_seq.get(seq, (0, 0))
            of_span = (begin <= places) & (places < end) & (begin <= keys) & (keys < end)
            near = keys >= places - 5
            shown.append((keys <= places) & near | of_span & (near | passes))
        filled.assert_right(q_len, found, q, shown=shown)
    filled.attention.check_device()
    cells = torch.ones(sum(new * length for new, length in zip(q_len, filled.kv_len, strict=True)), dtype=torch.bool)
    of_cells = BoolCells(cells.to(device), torch.full((17,), 2**20, device=device))
    if not mask_cells:
        with pytest.raises(WrongState, match="no memory is kept for them; build with mask_cells"):
            filled.attention.begin(filled.step(q_len, mask=of_cells))
        return
    nothing, _ = filled.attend(q_len, filled.step(q_len, mask=of_cells), q)
    assert not nothing.any()  # windows that are counted from places after all keys show none


@pytest.mark.fast(interpreted=1)
@pytest.mark.parametrize(("passes", "given_back"), [(True, -1), (True, 0), (True, BOUNDS.num_pages), (False, -1)])
def test_a_span_over_a_page_that_was_given_back_is_reported_if_it_passes_the_window(
    passes: bool, given_back: int, device: torch.device, provider: str
) -> None:
    """The span begins in page 0 of its sequence, and the window in page 1. The other sequences keep their tokens."""
    filled = Filled(device, provider, custom_mask=True, window_left=5, spans_pass_window=passes)
    assert isinstance(filled.source.entries, Tensor)
    filled.source.entries[1, 0] = given_back
    q_len, q = [3, 8, 5, 1], filled.rows(17, Q_HEADS, DIM)
    mask = DeviceSpans(torch.tensor([[1, 2, 33]], dtype=torch.int32, device=device))
    found, shown = filled.attend(q_len, filled.step(q_len, mask=mask), q), filled.cells(q_len, partial(near, 5, 0))
    shown[1] = np.zeros_like(shown[1]) if passes else filled.cells(q_len, partial(near, 5, 64))[1]
    filled.assert_right(q_len, found, q, shown=shown)
    with pytest.raises(DeviceFault, match="a page in the table") if passes else nullcontext():
        filled.attention.check_device()


@pytest.mark.fast(interpreted=1)
def test_spans_that_share_tokens_are_reported(device: torch.device, provider: str) -> None:
    """The shared tokens see both, and no other sequence is harmed. Their sum lay after both, so they saw neither."""
    filled = Filled(device, provider, custom_mask=True)
    q_len, q = [3, 10, 5, 1], filled.rows(19, Q_HEADS, DIM)
    spans = [(1, 23, 29), (1, 27, 32)]
    mask = DeviceSpans(torch.tensor(spans, dtype=torch.int32, device=device))
    found, shown = filled.attend(q_len, filled.step(q_len, mask=mask), q), filled.cells(q_len, partial(near, 64, 0))
    for _, begin, end in spans:
        shown[1][begin - 23 : end - 23, begin:end] = True
    filled.assert_right(q_len, found, q, shown=shown)
    with pytest.raises(DeviceFault, match="two spans of a sequence share a new token"):
        filled.attention.check_device()


def test_spans_of_another_form_are_refused_in_words() -> None:
    with pytest.raises(BadTensor, match="must be contiguous int32"):
        DeviceSpans(torch.zeros(4, 3))
    with pytest.raises(BadTensor, match="must be contiguous int32"):
        DeviceSpans(torch.zeros(3, 4, dtype=torch.int32).T)


@pytest.mark.fast(interpreted=1)
@pytest.mark.parametrize("q_len", [[3, 4, 2, 1], [1, 1, 1, 1]], ids=str)
def test_chunks_are_seen_in_engines_pages(q_len: list[int], device: torch.device, provider: str) -> None:
    """The engine has given back all pages before the chunk of a sequence's first new token."""
    filled = Filled(device, provider, chunk=16)
    assert isinstance(filled.source.entries, Tensor)
    for line, new, length in zip(filled.source.entries, q_len, filled.kv_len, strict=True):
        line[: (length - new) // 16 * 16 // PAGE] = -1
    q = filled.rows(sum(q_len), Q_HEADS, DIM)
    found = filled.attend(q_len, filled.step(q_len), q)
    shown = filled.cells(q_len, lambda at, keys: (keys <= at) & (keys // 16 == at // 16))
    filled.assert_right(q_len, found, q, shown=shown)
    masked = Filled(device, provider, chunk=16, custom_mask=True)
    cells = BoolCells(
        torch.ones(1000, dtype=torch.bool, device=device), torch.zeros(10, dtype=torch.int64, device=device)
    )
    with pytest.raises(Unsupported, match="a mask of cells in layers with chunks"):
        masked.attention.begin(masked.step(q_len, mask=cells))


def test_a_mask_of_more_cells_than_can_be_packed_is_refused_in_words() -> None:
    positions = torch.zeros(1, dtype=torch.int64, device="meta")
    with pytest.raises(BadTensor, match="a mask has 2147483648 cells, and at most 2143289344 can be packed"):
        BoolCells(torch.empty(2**31, dtype=torch.bool, device="meta"), positions)


def test_latent_pages_of_an_engine_are_stored_and_read(device: torch.device) -> None:
    """One row per token, whose first part is V, in pages of one token; torch's and AITER's kernels serve it."""
    generator = torch.Generator().manual_seed(0)
    latent = problem(num_kv_heads=1, head_dim=24, v_head_dim=16, page_size=1, pool=PoolKind.LATENT)
    table = torch.randperm(19, generator=generator)[:16].view(1, 16).to(device) + 1
    made = ExternalAttention(
        [LayerSource(latent)],
        {Space.FULL: TableSource(table)},
        device=device,
        bounds=BOUNDS,
        options=ExternalOptions(provider="torch"),
    )
    k_pages = torch.full((BOUNDS.num_pages, 1, 1, 24), float("nan"), device=device)
    with pytest.raises(BadTensor, match=r"layer 0 is latent: its v must be k\[..., :16\]"):
        made.pages.bind(0, k_pages, k_pages[..., :16].clone())
    made.pages.bind(0, k_pages, k_pages[..., :16])
    rows, done = torch.randn(10, 1, 24, generator=generator).to(device), 0
    for new in (9, 1):
        q = torch.randn(new, Q_HEADS, 24, generator=generator).to(device)
        out = torch.empty(new, Q_HEADS, 16, device=device)
        k = rows[done : done + new]
        done += new
        lengths, q_len = torch.tensor([done], device=device), NewLengths(torch.tensor([new], device=device))
        made.begin(ExternalStep(1, 1, new, lengths, q_len, None, min_q_len=new, max_q_len=new, max_kv_len=done))
        made.fill(table[0, done - new : done])
        made.layers.store(0, k, k[..., :16])
        made.layers.attend(0, q, out)
        stored = rows[:done].double().cpu().numpy()
        want, _ = attention(q.double().cpu().numpy(), stored, stored[..., :16], Scores(SCALE))
        assert np.allclose(out.cpu(), want, atol=2e-5)
    made.check_device()


def test_kernels_that_need_more_are_refused_with_reasons() -> None:
    """AITER's kernels require contiguous pages, and most of them tails that are zero."""
    half = problem(dtype=torch.bfloat16, head_dim=128, v_head_dim=128)
    with pytest.raises(Unsupported) as refused:
        ExternalAttention(
            [LayerSource(half)],
            {Space.FULL: TableSource(torch.zeros(4, 4, dtype=torch.int32, device="meta"))},
            device="meta",
            bounds=BOUNDS,
            options=ExternalOptions(provider="aiter", page_strides=True),
            target=known_target("gfx942"),
        )
    text = str(refused.value)
    assert "aiter.paged_attention_ragged: it needs contiguous pages, and these may have other strides" in text
    assert "aiter.unified_attention: the tail of a sequence's last page must be zeroed for it" in text


def test_pages_whose_slots_are_no_int32_are_refused(device: torch.device) -> None:
    """A sequence's slot was that of another one, 2**32 slots before it."""
    bounds = Bounds(num_seqs=1, kv_len=16, num_pages=2**31 - 1)
    table = TableSource(torch.zeros(1, 1, dtype=torch.int32, device=device))
    options = ExternalOptions(provider="torch", page_strides=True)
    layer = LayerSource(problem(v_head_dim=DIM))
    attention = ExternalAttention([layer], table, device=device, bounds=bounds, options=options)
    k, v = (torch.zeros(1, PAGE, KV_HEADS, DIM, device=device).expand(2**27, -1, -1, -1) for _ in range(2))
    with pytest.raises(NeverFits, match=r"134217728 of 16 tokens each, which overflow .*give at most 134217727"):
        attention.pages.bind(0, k, v)
    attention.pages.bind(0, k[1:], v[1:])


def test_pages_that_kernels_cannot_read_are_refused(device: torch.device, provider: str) -> None:
    filled = Filled(device, provider)
    for k, v, why in (
        (filled.k.transpose(1, 2).contiguous().transpose(1, 2), filled.v, "build with page_strides=True"),
        (
            filled.k[:, :8],
            filled.v,
            "k has pages of 8 tokens, 2 heads and 16 elements; its pages are K and V pages of 16",
        ),
        (filled.k.half(), filled.v, "k is torch.float16; its pages are"),
        (torch.cat([filled.k, filled.k]), filled.v, "kernels were chosen for 20; raise num_pages"),
        (None, filled.v, "a side of the pages of layer 0 is a NoneType; give a tensor"),
        (filled.v.flatten()[: filled.k.numel()].view_as(filled.k), filled.v, "k and v of layer 0 are the same memory"),
        (filled.k, filled.v.tolist(), "a side of the pages of layer 0 is a list; give a tensor"),
        (filled.k, filled.v[0, 0, 0], "a side of the pages of layer 0 is .24.; give .pages, page_size, heads, elem"),
    ):
        with pytest.raises((BadTensor, CapacityExceeded), match=why):
            filled.attention.pages.bind(0, k, v)  # type: ignore[arg-type]
    with pytest.raises(BadTensor, match="coded is a tuple; it must be of type EnginePages"):
        filled.attention.pages.bind(0, filled.k, filled.v, (None, None))  # type: ignore[arg-type]
    for layer in (1, -1, None, "0"):
        with pytest.raises(BadTensor, match=f"layer {layer!r} does not exist"):
            filled.attention.pages.bind(layer, filled.k, filled.v)  # type: ignore[arg-type]


def test_calls_out_of_order_are_refused(device: torch.device, provider: str) -> None:
    engine = VLLM(PAGE, device=device, provider=provider)
    made, nothing = engine.attention, torch.zeros(1, KV_HEADS, DIM, device=device)
    with pytest.raises(WrongState, match=r"there is no step to fill; call begin\(\) first"):
        made.fill()
    with pytest.raises(WrongState, match=r"call begin\(\) and fill\(\) first"):
        made.layers.store(0, nothing, nothing)
    with pytest.raises(WrongState, match=r"call seal\(\) before the first captured step"):
        engine.capture(4)
    made.seal()
    step = ExternalStep.decode(torch.zeros(1, dtype=torch.int32, device=device), num_seqs=0, max_kv_len=1)
    with pytest.raises(WrongState, match="call it before the capture"), recorder_for(device).capture():
        made.begin(step)
    with pytest.raises(WrongState, match="addresses are sealed already"):
        made.seal()
    with pytest.raises(CapacityExceeded, match="padded to 17 sequences, and the most is 16; raise num_seqs"):
        engine.run([engine.admit()], [1], pads=16)


@pytest.mark.fast(interpreted=0)
def test_a_second_fill_that_is_refused_leaves_no_step_to_run(device: torch.device, provider: str) -> None:
    """It would store to the table's slots, which the first one dropped."""
    filled = Filled(device, provider)
    made, row = filled.attention, filled.rows(1, KV_HEADS, DIM)
    made.begin(filled.step([1]))
    made.fill(torch.tensor([-1], device=device))
    with pytest.raises(BadTensor, match="slots are"):
        made.fill(torch.tensor([[-1]], device=device))
    with pytest.raises(WrongState, match=r"call begin\(\) and fill\(\) first"):
        made.layers.store(0, row, row)


def test_after_a_step_that_is_refused_the_one_before_it_cannot_be_filled_or_run(device: torch.device) -> None:
    """It would store over its own tokens."""
    filled = Filled(device, "torch")
    made, row = filled.attention, filled.rows(1, KV_HEADS, DIM)
    made.begin(filled.step([1]))
    made.fill()
    kv_len = torch.ones(BOUNDS.num_seqs + 1, dtype=torch.int32, device=device)
    with pytest.raises(NeverFits, match="padded to 9 sequences"):
        made.begin(ExternalStep.decode(kv_len, num_seqs=1, max_kv_len=1))
    with pytest.raises(WrongState, match=r"call begin\(\) and fill\(\) first"):
        made.layers.store(0, row, row)
    with pytest.raises(WrongState, match=r"there is no step to fill; call begin\(\) first"):
        made.fill()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["read in place", "gathered"])
def test_a_table_for_which_memory_runs_out_changes_nothing(dtype: torch.dtype, device: torch.device) -> None:
    filled = Filled(device, "torch")
    made = filled.build(TableSource(filled.source.entries.to(dtype)))
    assert made.tables.gathered is (dtype is torch.int64), "kernels read int32"
    larger = made.tables.spaces[0].source.entries.new_zeros((9, 4))  # type: ignore[union-attr]
    with pytest.raises(torch.OutOfMemoryError), OutOfMemory(1):
        made.tables.use(larger)
    filled.attention = made
    q_len, q = [3, 4, 2, 1], filled.rows(10, Q_HEADS, DIM)
    filled.assert_right(q_len, filled.attend(q_len, filled.step(q_len), q), q)
    made.check_device()
    filled.attend([1] * 5, filled.step([1] * 5, [1] * 5), filled.rows(5, Q_HEADS, DIM))
    with pytest.raises(DeviceFault, match="a row that was given lies outside of the table"):
        made.check_device()


def test_a_larger_table_that_is_given_in_inference_mode_is_read_outside_of_it(device: torch.device) -> None:
    filled = Filled(device, "torch")
    with torch.inference_mode():
        filled.attention.tables.use(torch.cat([filled.source.entries] * 2))
    q_len, q = [3, 4, 2, 1], filled.rows(10, Q_HEADS, DIM)
    step = replace(filled.step(q_len), rows=torch.arange(4, 8, device=device))
    filled.assert_right(q_len, filled.attend(q_len, step, q), q)


def test_a_table_that_is_replaced_before_the_fill_drops_its_step(device: torch.device) -> None:
    """A fill would gather rows that begin() has not compared with the new table."""
    filled = Filled(device, "torch")
    made = filled.build(TableSource(filled.source.entries.long()))
    made.begin(filled.step([1] * 4))
    made.tables.use(filled.source.entries[:1].long())
    with pytest.raises(WrongState, match=r"there is no step to fill; call begin\(\) first"):
        made.fill()


@pytest.mark.fast(interpreted=1)
def test_tensors_of_another_device_are_refused_in_every_step(device: torch.device, provider: str) -> None:
    """Also in a step whose shape has run before."""
    filled = Filled(device, provider, custom_mask=True)
    cells, places = (torch.zeros(n, dtype=dtype, device=device) for n, dtype in ((64, torch.bool), (4, torch.int32)))
    given = filled.step([1, 1, 1, 1], mask=BoolCells(cells, places))
    filled.attention.begin(given)
    for change, why in (
        ({"kv_len": given.kv_len.to("meta")}, "kv_len is on meta, not on"),
        ({"rows": places.to("meta")}, "rows is on meta, not on"),
        ({"mask": BoolCells(cells.to("meta"), places)}, "the mask's cells are on meta, not on"),
        ({"mask": BoolCells(cells, places.to("meta"))}, "the mask's positions are on meta, not on"),
    ):
        with pytest.raises(BadTensor, match=why):
            filled.attention.begin(replace(given, **change))
    filled.attention.begin(given)
    with pytest.raises(BadTensor, match="slots are on meta, not on"):
        filled.attention.fill(places.to("meta"))


@pytest.mark.fast(interpreted=0)
def test_a_step_of_more_tokens_than_the_bounds_is_refused(device: torch.device, provider: str) -> None:
    engine = VLLM(PAGE, device=device, provider=provider)
    first, second = engine.admit(), engine.admit()
    with pytest.raises(
        CapacityExceeded, match="padded to 129 tokens, and the most is 128; raise num_tokens of the bounds"
    ):
        engine.run([first, second], [90, 30], pads=9)
    engine.run([first, second], [90, 30], pads=8)


@pytest.mark.fast(interpreted=0)
def test_bounds_without_tokens_are_those_of_any_step_and_seal_makes_room_for_decode(
    device: torch.device, provider: str
) -> None:
    engine = VLLM(PAGE, device=device, provider=provider)
    engine.attention = ExternalAttention(
        [LayerSource(problem())],
        engine.sources(),
        device=device,
        bounds=Bounds(num_seqs=16, kv_len=96, num_pages=engine.num_pages),
        options=ExternalOptions(provider=provider, page_strides=True),
    )
    engine.attention.pages.bind(0, *engine.pages[0])
    engine.attention.seal()
    requests = [engine.admit(), engine.admit()]
    engine.run(requests, [90, 80])
    engine.capture(16).run(requests)
    with pytest.raises(CapacityExceeded, match="larger than the bounds given to seal"):
        engine.capture(16, width=2)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_seqs": 5}, "5 sequences are padded to 4"),
        ({"padded_tokens": 3}, "give as many tokens as sequences"),
        (
            {"min_q_len": 3, "max_q_len": 2, "q": NewLengths(torch.ones(4, dtype=torch.int32))},
            "min_q_len is 3, max_q_len 2",
        ),
        ({"kv_len": torch.zeros(3, dtype=torch.int32)}, "kv_len is torch.int32 .3.; .* at least 4 elements"),
        ({"kv_len": torch.zeros(4)}, "kv_len is torch.float32"),
        ({"kv_len": [1] * 4}, "kv_len is a list; give a tensor on the device"),
        ({"rows": range(4)}, "rows is a range; give a tensor on the device"),
        ({"q": torch.ones(4, dtype=torch.int32)}, "q of a step is a Tensor; it must be OneEach or NewLengths or Bound"),
        ({"mask": torch.ones(16, dtype=torch.bool)}, "mask of a step is a Tensor; it must be NoCells or BoolCells or"),
        ({"causality": True}, "causality of a step is a bool; it must be Causality"),
        ({"captured": 1}, "captured of a step is a int; it must be bool"),
        ({"num_seqs": 4.0}, r"num_seqs of a step is 4\.0; it must be a whole number"),
        ({"max_kv_len": float("nan")}, "max_kv_len of a step is nan; it must be a whole number"),
        ({"max_kv_len": -1}, "max_kv_len -1"),
        ({"rows": torch.zeros(4, 1, dtype=torch.int32)}, "rows is torch.int32 .4, 1."),
        ({"q": Boundaries(torch.zeros(4, dtype=torch.int32)), "max_q_len": 2}, "q is .* with at least 5 elements"),
    ],
)
def test_a_step_that_contradicts_itself_is_refused(change: dict[str, object], why: str) -> None:
    right: dict[str, object] = {
        "num_seqs": 4,
        "padded_seqs": 4,
        "padded_tokens": 4,
        "kv_len": torch.ones(4, dtype=torch.int32),
        "q": ONE_EACH,
        "rows": None,
        "min_q_len": 1,
        "max_q_len": 1,
        "max_kv_len": 4,
    }
    assert isinstance(ExternalStep(**right).q, OneEach)  # type: ignore[arg-type]
    with pytest.raises((BadBatch, BadTensor), match=why):
        ExternalStep(**{**right, **change})  # type: ignore[arg-type]
    numbers = {"num_seqs": np.int64(4), "max_kv_len": torch.tensor(4)}
    assert ExternalStep(**{**right, **numbers}) is not None


def test_a_step_of_lengths_that_are_no_tensor_is_refused() -> None:
    for lengths in ([4], torch.tensor(4)):
        with pytest.raises(BadTensor, match="kv_len is "):
            ExternalStep.decode(lengths, num_seqs=1, max_kv_len=4)  # type: ignore[arg-type]


def test_layers_tables_and_bounds_must_agree(device: torch.device, provider: str) -> None:
    table = TableSource(torch.zeros(4, 4, dtype=torch.int32, device=device))
    options = ExternalOptions(provider=provider)

    def build(layers: Sequence[LayerSource], tables: dict[Space, TableSource]) -> ExternalAttention:
        return ExternalAttention(layers, tables, device=device, bounds=BOUNDS, options=options)

    with pytest.raises(BadProblem, match="no layers"):
        build([], {Space.FULL: table})
    with pytest.raises(BadProblem, match=r"layers disagree on the page size \(\[16, 32\]\)"):
        build([LayerSource(problem()), LayerSource(problem(page_size=32))], {Space.FULL: table})
    with pytest.raises(BadProblem, match=r"layers live in the spaces \['GROUP1'\] and tables are given for \['FULL'\]"):
        build([LayerSource(problem(), Space("group1"))], {Space.FULL: table})
    with pytest.raises(BadSetting, match="a layer is a Problem; it must be of type LayerSource"):
        build([problem()], {Space.FULL: table})  # type: ignore[list-item]
    with pytest.raises(BadSetting, match="problem of a layer is a NoneType"):
        LayerSource(None)  # type: ignore[arg-type]
    with pytest.raises(BadSetting, match="space of a layer is a str"):
        LayerSource(problem(), "full")  # type: ignore[arg-type]
    with pytest.raises(BadSetting, match="causalities is empty"):
        ExternalOptions(causalities=())
    with pytest.raises(BadSetting, match="one of causalities is a str"):
        ExternalOptions(causalities="causal")  # type: ignore[arg-type]
    with pytest.raises(BadSetting, match=r"kv_len is 268435457; it must be from 1 to 268435456"):
        Bounds(num_seqs=1, kv_len=2**28 + 1, num_pages=2)
    with pytest.raises(BadSetting, match="num_pages is 0"):
        Bounds(num_seqs=1, num_tokens=1, kv_len=1, num_pages=0)
    with pytest.raises(BadTensor, match=r"entries is torch.float32 \[2, 2\]"):
        TableSource(torch.zeros(2, 2))
    with pytest.raises(BadTensor, match="entries is a list; give a tensor"):
        TableSource([[1, 2]])  # type: ignore[arg-type]
    with pytest.raises(BadTensor, match="a table is a Tensor; give a TableSource or a CsrSource of it"):
        build([LayerSource(problem())], {Space.FULL: table.entries})  # type: ignore[dict-item]
    with pytest.raises(BadTensor, match="indptr has 1 elements"):
        CsrSource(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"unit": "slot"}, "unit is a str; it must be of type TableUnit"),
        ({"null_page": "no"}, "null_page is a str; it must be of type bool"),
        ({"copied": None}, "copied is a NoneType; it must be of type bool"),
    ],
)
def test_a_table_in_words_of_its_own_is_refused(values: dict[str, Any], words: str) -> None:
    """A table of slots was read as one of pages, and null_page="no" counted as True."""
    entries = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(BadTensor, match=words):
        TableSource(entries, **values)
    if "unit" not in values:
        with pytest.raises(BadTensor, match=words):
            CsrSource(entries[0], entries[0], **values)


def test_a_policy_for_faults_that_cannot_be_called_is_refused() -> None:
    """The first fault ended in a TypeError, and was not reported."""
    with pytest.raises(BadSetting, match="on_fault is 'log'; give a callable"):
        ExternalOptions(on_fault="log")  # type: ignore[arg-type]


def test_a_class_of_policies_is_no_policy() -> None:
    """It swallowed each fault: the fault became the log of a new policy."""
    options = ExternalOptions(on_fault=LogAndCount)  # type: ignore[arg-type]
    with pytest.raises(BadSetting, match="log is a DeviceFault; it must be of type Logger"):
        options.on_fault(DeviceFault("a fault"))


def test_a_causality_in_words_of_its_own_is_refused(device: torch.device, provider: str) -> None:
    table = TableSource(torch.zeros(4, 4, dtype=torch.int32, device=device))
    options = ExternalOptions(provider=provider)
    attention = ExternalAttention([LayerSource(problem())], table, device=device, bounds=BOUNDS, options=options)
    with pytest.raises(BadSetting, match="causality is a str; it must be of type Causality"):
        attention.kernels("causal")  # type: ignore[arg-type]
    with pytest.raises(BadSetting, match="causality is a str; it must be of type Causality"):
        options.problem(problem(), "causal")  # type: ignore[arg-type]
    with pytest.raises(WrongState, match="no kernels were chosen for steps with CAUSAL"):
        attention.kernels(Causality.CAUSAL)
    for layer in (1, -1):
        for of_pages in (attention.pages.format, attention.pages.layer, attention.pages.index):
            with pytest.raises(BadTensor, match=f"layer {layer} does not exist; the runtime has layers 0 to 0"):
                of_pages(layer)


def test_an_interrupt_leaves_the_same_weights_in_steps_of_every_causality() -> None:
    attention = ExternalAttention(
        [LayerSource(problem(has_sinks=True))],
        TableSource(torch.zeros(4, 4, dtype=torch.int32)),
        device="cpu",
        bounds=BOUNDS,
        options=ExternalOptions(provider="torch", causalities=[Causality.CAUSAL, Causality.NOT_CAUSAL]),
    )
    numbers = itertools.count(1)

    def change() -> None:
        attention.set_head_weights(0, HeadWeights(torch.full((Q_HEADS,), float(next(numbers)))))

    change()
    for _ in every_line(change):
        causal, other = (core.head_weights.of(0).sinks for core in attention.cores.values())
        assert causal is not None
        assert other is not None
        assert torch.equal(causal, other)
