"""Layers with rows of several tokens (DeepSeek-V4): every kind of step equals the paper's formulas, also replayed."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.forecast import plan_capture
from rocm_attn.errors import BadBatch, BadProblem, BadTensor, Unsupported, WrongState
from rocm_attn.external import Bounds, ExternalAttention, LayerSource
from rocm_attn.integrations.kv_passport import KVPassport
from rocm_attn.kernels.cache.row_work import QkvWork
from rocm_attn.machine.target import known_target
from rocm_attn.machine.values_json import as_json, from_json
from rocm_attn.paging.adopted import TableSource
from rocm_attn.paging.kv_pool import page_bytes, state_bytes
from rocm_attn.problem import EarlierSelection, Indexer, KVEncoding, LastUnit, PoolKind, Problem, Row, Scales
from rocm_attn.providers.select import select
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from tests.amd.worlds.compressed import (
    ALL,
    CHOSEN,
    DIM,
    HEAVY,
    INDEX_DIM,
    INDEXING,
    SPARSE,
    WINDOW,
    CompressedWorld,
    Drawn,
    batch_of,
    folded,
    layers,
)
from tests.amd.worlds.problems import providers


@pytest.mark.fast(interpreted=0)
@pytest.mark.parametrize("swa_pages", [0, 20], ids=["one space", "two spaces"])
def test_a_window_and_rows_share_one_softmax_and_one_sink(
    provider: str, graphs: bool, swa_pages: int, device: torch.device
) -> None:
    """Prompts whose ends are in the middle of a row, mixed steps, and decode steps over several rows and pages."""
    world = CompressedWorld.build(device, provider, graphs=graphs, swa_pages=swa_pages)
    first, second = world.admit(), world.admit()
    world.step([first], [19])
    world.step([second, first], [3, 1])
    for _ in range(9):
        world.step([first, second], [1, 1])
    world.step([second], [13])
    assert not graphs or world.runner.counters.replays > 0


@pytest.mark.fast(2, interpreted=1)
@pytest.mark.parametrize("encoding", [KVEncoding.E4M3FN, KVEncoding.E4M3FNUZ], ids=str)
def test_a_window_and_rows_lie_in_records_with_footers(
    provider: str, encoding: KVEncoding, device: torch.device
) -> None:
    """DeepSeek-V4's pages in engines. A fork writes into a copy of a page, whose footer is copied with it."""
    coded = {"kv_encoding": encoding, "kv_scales": Scales.FOOTER}
    world = CompressedWorld.build(device, provider, graphs=True, coded=coded, swa_pages=20)
    first = world.admit()
    world.step([first], [19])
    second = world.fork(first, 18)
    world.step([second, first], [3, 1])
    for _ in range(3):
        world.step([first, second], [1, 1])
    assert world.runner.counters.replays > 0


def bits_of(world: CompressedWorld, story: Drawn, chunks: list[int], neighbours: list[int]) -> list[Tensor]:
    """The outputs of a story's tokens in both layers, computed in chunks beside a request of as many other tokens."""
    request, other = world.admit(), world.admit()
    found: list[list[Tensor]] = [[], []]
    first = 0
    for new, beside in zip(chunks, neighbours, strict=True):
        others = [(other, Drawn.of(beside, world.generator))] if beside else []
        both = [*others, (request, story.part(first, first + new))]
        world.step([each for each, _ in both], [len(drawn.q) for _, drawn in both], [drawn for _, drawn in both])
        for of_layer, layer in zip(found, (SPARSE, ALL), strict=True):
            of_layer.append(world.out[layer][beside : beside + new].cpu().clone())
        first += new
    return [torch.cat(of_layer) for of_layer in found]


@pytest.mark.nightly
@pytest.mark.skipif("triton" not in providers(), reason="only Triton's kernels attend to rows deterministically")
def test_the_bits_of_a_deterministic_token_depend_on_nothing_but_its_sequence(device: torch.device) -> None:
    """A prompt of 13 tokens at once, and in chunks that end within rows, beside another request."""
    story = Drawn.of(13, torch.Generator().manual_seed(3))
    whole, cut = (
        bits_of(CompressedWorld.build(device, "triton", deterministic=True), story, chunks, neighbours)
        for chunks, neighbours in (([13], [0]), ([11, 2], [2, 0]))
    )
    for one, other in zip(whole, cut, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("swa_pages", [0, 20], ids=["one space", "two spaces"])
def test_rejected_drafts_leave_nothing_behind(graphs: bool, swa_pages: int, device: torch.device) -> None:
    """Verify steps of five tokens, of which any number is rejected: rows that they made are made again of others."""
    world = CompressedWorld.build(
        device, "torch", graphs=graphs, swa_pages=swa_pages, swa_kept=5, verify_tokens=5, capture_tokens=(5,)
    )
    request = world.admit()
    world.step([request], [6])
    for accepted in (1, 5, 2, 3, 1, 4, 1):
        before = request.kv_len
        world.step([request], [5])
        world.take_back(request, before + accepted)


def test_a_row_that_is_cut_goes_on_within_a_row(device: torch.device) -> None:
    """The state of a row that is not full comes back with the page that it lies in."""
    world = CompressedWorld.build(device, "torch", swa_pages=20, swa_kept=12)
    request = world.admit()
    world.step([request], [22])
    for kv_len in (21, 14, 11):
        world.truncate(request, kv_len)
        world.step([request], [6])


def test_a_fork_goes_on_from_a_state_of_its_own(device: torch.device) -> None:
    """Parent and child share a page in which a row is half full, and fill it with different tokens."""
    world = CompressedWorld.build(device, "torch", swa_pages=20)
    parent = world.admit()
    world.step([parent], [18])
    child = world.fork(parent, 18)
    world.step([parent, child], [1, 1])
    world.step([child, parent], [7, 2])
    world.runtime.table.free(parent.row)
    world.step([child], [9])


def test_a_request_that_gave_way_is_computed_again_on_other_pages(device: torch.device) -> None:
    world = CompressedWorld.build(device, "torch", swa_pages=20)
    one, other = world.admit(), world.admit()
    world.step([one, other], [10, 13])
    world.runtime.table.free(one.row)
    world.step([other], [14])
    again = world.admit()
    world.step([again, other], [11, 1])


@pytest.mark.parametrize("swa_pages", [0, 4], ids=["one space", "two spaces"])
def test_the_state_of_a_long_request_takes_no_more_pages_than_a_window(swa_pages: int, device: torch.device) -> None:
    world = CompressedWorld.build(device, "torch", swa_pages=swa_pages)
    request = world.admit()
    for _ in range(7):
        world.step([request], [8])


def test_a_capture_plan_counts_states_in_the_space_that_they_lie_in() -> None:
    options = RuntimeOptions(num_pages=10, max_num_seqs=2, max_kv_len=16, provider="torch", swa_pages=6)
    problems = layers()
    plan = plan_capture(problems, known_target("cpu"), options)
    parts = {part.name: part.num_bytes for part in plan.parts}
    of_window, of_rows = problems[:1], problems[1:]
    assert parts["KV pool"] == 10 * page_bytes(of_rows)
    assert parts["swa KV pool" if "swa KV pool" in parts else "SWA KV pool"] == 6 * (
        page_bytes(of_window) + state_bytes(problems)
    )
    # Eight tokens: a latent each in the window; two rows and index keys, and one row; values and gates, float32.
    assert page_bytes(of_window) == 8 * DIM * 4
    assert page_bytes(of_rows) == 2 * (DIM + INDEX_DIM) * 4 + DIM * 4
    assert state_bytes(problems) == 8 * 2 * (2 * (DIM + INDEX_DIM) + DIM) * 4
    assert "row_of_4_tokens" in parts


def test_a_layer_that_did_not_fold_has_stored_nothing(device: torch.device) -> None:
    world = CompressedWorld.build(device, "torch")
    request = world.admit()
    world.step([request], [5])
    world.runtime.table.reserve(request.row, 6)
    batch = batch_of([request], [1])
    step = world.runtime.step(batch).parts[0]
    row = torch.zeros(len(step.token_ids), 1, DIM, device=device)
    for layer in (WINDOW, SPARSE, ALL):
        step.layers.store(layer, row, row)
    step.layers.store_index(SPARSE, row[:, 0, :INDEX_DIM])
    world.runtime.end_step()
    later = replace(batch, kv_len=batch.kv_len + 1)
    world.runtime.table.reserve(request.row, 7)
    with pytest.raises(BadBatch, match="its last step did not store in the state of layer 1, the state of layer 2"):
        world.runtime.step(later)


def test_what_cannot_be_folded_is_refused(device: torch.device) -> None:
    world = CompressedWorld.build(device, "torch")
    request = world.admit()
    world.runtime.table.reserve(request.row, 1)
    request.drawn = world.inputs.first(1)
    step = world.runtime.step(batch_of([request], [1])).parts[0]
    count, calls = len(step.token_ids), step.layers
    rows = torch.zeros(count, DIM, device=device)
    with pytest.raises(BadTensor, match="layer 0 has rows of one token and no state; the layers with one are 1, 2"):
        calls.fold(WINDOW, rows, rows, rows)
    with pytest.raises(BadTensor, match=r"values has shape \[\d+, 128\]; this step and layer need \[\d+, 288\]"):
        calls.fold(SPARSE, rows, rows, rows)
    with pytest.raises(BadTensor, match=r"gates is torch\.bfloat16"):
        calls.fold(ALL, rows, rows.bfloat16(), rows)
    with pytest.raises(BadTensor, match="a row of layer 2 stands for 8 tokens, and rope turns by the places of tokens"):
        calls.rope_and_store(ALL, rows, rows[:, None], rows[:, None], rows, QkvWork(None))
    world.runtime.end_step()
    with pytest.raises(WrongState):
        calls.fold(ALL, rows, rows, rows)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"row": Row(3)}, "rows of 3 tokens in pages of 8; the page size must be a multiple"),
        ({"window_left": 3}, "must be latent and causal, without a window"),
        ({"pool": PoolKind.SPLIT}, "must be latent and causal, without a window"),
        ({"custom_mask": True}, "must be latent and causal, without a window, ALiBi slopes and custom masks"),
        ({"indexer": EarlierSelection(INDEXING)}, "an indexer of keys of 4 tokens .* for rows of 8 tokens"),
        (
            {"row": CHOSEN, "indexer": Indexer(2, 16, replace(INDEXING, last_unit=LastUnit.ADDED))},
            "whose last unit is added to what is chosen, for rows of 4 tokens; it must choose whole rows",
        ),
    ],
)
def test_rows_that_cannot_be_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadProblem, match=says):
        replace(layers()[ALL], **changes)


@pytest.mark.parametrize(("tokens", "overlaps", "also"), [(0, False, 0), (1, True, 0), (1, False, 8), (4, True, -1)])
def test_a_row_has_a_token_and_is_folded_only_if_it_has_several(tokens: int, overlaps: bool, also: int) -> None:
    with pytest.raises(BadProblem, match=f"a row of {tokens} tokens with overlaps={overlaps} and also={also}; give 1"):
        Row(tokens, overlaps, also)


def test_kernels_of_single_tokens_refuse_rows_of_several() -> None:
    of_v4 = replace(layers(dtype=torch.bfloat16)[ALL], num_q_heads=8, head_dim=512, v_head_dim=512)
    chosen = select(of_v4, known_target("gfx942"), "triton")
    assert {kernel.entry.name for kernel in chosen.kernels.values()} == {"triton.rows"}
    refused = [refusal for refusal in chosen.refusals if refusal.kernel == "triton.latent_decode"]
    assert [refusal.reason for refusal in refused] == ["it reads rows of one token, not of 8"]
    with pytest.raises(Unsupported) as refusal:
        select(replace(layers()[ALL], row=Row()), known_target("gfx942"), "triton")
    assert "decode: triton.rows: it reads rows of several tokens, not of 1" in refusal.value.reasons


def test_a_dump_of_a_flight_recorder_says_what_rows_stand_for() -> None:
    halved = replace(layers()[ALL], row=replace(HEAVY, state_dtype=torch.bfloat16))
    for problem in (*layers(), halved):
        assert from_json(Problem, json.loads(json.dumps(as_json(problem))), "problem") == problem


def test_a_state_in_bfloat16_takes_half_the_bytes_and_takes_values_of_its_dtype(device: torch.device) -> None:
    halved = [replace(each, row=replace(each.row, state_dtype=torch.bfloat16)) for each in layers()[1:]]
    assert 2 * state_bytes(halved) == state_bytes(layers())
    options = RuntimeOptions(num_pages=20, max_num_seqs=2, max_kv_len=64, provider="torch")
    runtime = build_runtime([halved[1]], options, device=device)
    request = runtime.table.admit()
    generator = torch.Generator().manual_seed(0)
    values, gates = (torch.randn(16, DIM, generator=generator).to(device) for _ in range(2))
    for first, end in ((0, 11), (11, 16)):  # the second row begins in one step and ends in another
        runtime.table.reserve(request, end)
        step = runtime.step(StepBatch([request], [end], [end - first], NO_TOKEN_IDS)).parts[0]
        at = torch.arange(first, first + len(step.token_ids), device=device).clamp(max=15)
        rows, k = torch.empty(len(at), DIM, device=device), torch.zeros(len(at), 1, DIM, device=device)
        with pytest.raises(BadTensor, match=r"values is torch\.float32; the layer works in torch\.bfloat16"):
            step.layers.fold(0, values[at], gates[at], rows)
        step.layers.fold(0, values[at].bfloat16(), gates[at].bfloat16(), rows)
        step.layers.store(0, k, k)
        runtime.end_step()
    want = folded(values.cpu().bfloat16(), gates.cpu().bfloat16(), HEAVY)[1]
    torch.testing.assert_close(rows[4].cpu().double(), want, atol=1e-6, rtol=1e-6)


def test_a_state_has_a_dtype_that_is_kept() -> None:
    with pytest.raises(BadProblem, match=r"state_dtype of a row is torch\.float16; it must be torch\.float32 or"):
        Row(4, state_dtype=torch.float16)


def test_a_transfer_refuses_rows_of_several_tokens(device: torch.device) -> None:
    with pytest.raises(Unsupported, match="rows of several tokens and their state cannot be sent"):
        KVPassport.of(CompressedWorld.build(device, "torch").runtime)


def test_an_engine_that_owns_the_pages_is_told_that_no_state_lies_there(device: torch.device) -> None:
    table = TableSource(torch.zeros(2, 4, dtype=torch.int32, device=device))
    with pytest.raises(BadProblem, match="a layer has rows of several tokens, whose state no engine's pages hold here"):
        ExternalAttention(
            [LayerSource(layers()[ALL])], table, device=device, bounds=Bounds(num_seqs=2, kv_len=16, num_pages=8)
        )
