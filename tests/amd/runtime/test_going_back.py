"""Rows that go back or share pages, and steps that stop half way: tokens that may be stored, and that are read."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadBatch, DeviceFault, WrongState
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import Request, World, take_back


def family(world: World, kv_len: int, shared: int) -> tuple[Request, Request]:
    """Returns a request of kv_len tokens and a fork of the first ones."""
    (parent,) = world.begun(kv_len)
    return parent, world.fork(parent, shared)


def assert_refused(world: World, request: Request, q_len: int) -> None:
    """Checks that a step is refused when it stores, and that the error names the call to make."""
    start = request.kv_len
    step = world.runtime.step(world.batch([request], [q_len])).parts[0]
    _, k, v = world.qkv(world.problems[0], step)
    with pytest.raises(BadBatch, match=rf"call truncate\({request.row}, {start}\) and reserve"):
        step.layers.store(0, k, v)
    world.runtime.end_step()


@pytest.mark.fast(interpreted=0)
@pytest.mark.parametrize("freed", ["parent", "child"])
def test_who_holds_its_pages_alone_again_goes_back_freely(provider: str, freed: str, device: torch.device) -> None:
    world = World.build([small_problem()], device, provider)
    parent, child = family(world, 10, 10)
    gone, left = (parent, child) if freed == "parent" else (child, parent)
    world.free(gone)
    take_back(left, 6)
    world.step([left], [6])
    assert not world.runtime.table.tokens.has_first_writable


@pytest.mark.fast(interpreted=0)
def test_both_spaces_keep_what_is_shared(provider: str, device: torch.device) -> None:
    problems = [small_problem(window_left=3), small_problem()]
    world = World.build(problems, device, provider, swa_pages=24, swa_kept=4)
    parent, child = family(world, 14, 14)
    take_back(parent, 3)
    assert_refused(world, parent, 1)
    world.runtime.table.truncate(parent.row, 11)
    for _ in range(6):
        world.step([parent, child], [2, 3])
    world.free(parent)
    world.free(child)
    assert all(table.num_free_pages == table.num_usable_pages for table in world.runtime.table.spaces)


@pytest.mark.fast(interpreted=0)
def test_a_split_step_that_would_write_to_a_shared_page_is_refused_in_both_halves(
    provider: str, device: torch.device
) -> None:
    world = World.build([small_problem()], device, provider)
    parent, _ = family(world, 6, 6)
    (other,) = world.begun(2)
    take_back(parent, 1)
    batch = world.batch([other, parent], [1, 1])
    split = world.runtime.step(batch, world.runtime.plan(batch, halves=2))
    for half in split.parts:
        k = torch.zeros(half.token_ids.shape[0], 2, 16, device=world.runtime.device)
        with pytest.raises(BadBatch, match="sequence 1 would store token 5"):
            half.layers.store(0, k, k)
    world.runtime.end_step()
    world.runtime.table.truncate(parent.row, 5)
    world.step([other, parent], [1, 1])


@pytest.mark.fast(interpreted=0)
def test_steps_that_only_attend_read_what_rows_share(provider: str, graphs: bool, device: torch.device) -> None:
    """Decoders do so over an encoder's KV, each beam in a fork of its row; the longest chunk first."""
    problem = replace(small_problem(), window_right=UNLIMITED_WINDOW)
    world = World.build([problem], device, provider, capture_sizes=(4,))
    runtime = world.runtime
    encoder, beam = family(world, 10, 10)
    q = torch.zeros(16, 6, 16, device=runtime.device)
    out = torch.zeros_like(q)

    def attend(step: Part) -> Tensor:
        used = slice(0, step.token_ids.shape[0])
        step.layers.attend(0, q[used], out[used])
        return out[used].index_select(0, step.last_token_of_seq)

    runner = StepRunner(runtime, attend, recorder_for(runtime.device) if graphs else None)
    pages = runtime.pool.layer(0).k.clone()
    for new in (7, 1, 1):
        q[: 2 * new] = world.random(2 * new, 6, 16)
        runner.run(StepBatch(np.array([encoder.row, beam.row]), np.array([10, 10]), np.array([new, new]), NO_TOKEN_IDS))
        padded = torch.zeros(out.shape[0] - 2 * new, 6, 16, device=runtime.device)
        world.check(0, [encoder, beam], [new, new], q, torch.cat([out[: 2 * new], padded]), None)
    assert torch.equal(pages.nan_to_num(7.0), runtime.pool.layer(0).k.nan_to_num(7.0))
    runtime.table.reserve(beam.row, 11)
    with pytest.raises(BadBatch, match="attends to the first 11 tokens of row 2, of which 10 are stored"):
        runner.run(StepBatch(np.array([beam.row]), np.array([11]), np.array([1]), NO_TOKEN_IDS))


@pytest.mark.fast(interpreted=0)
def test_a_length_on_the_device_does_not_lead_into_what_is_shared(
    provider: str, graphs: bool, device: torch.device
) -> None:
    serving = World.one_layer(device, graphs=graphs, provider=provider, capture_tokens=(8,))
    parent, other = serving.begun(9, 3)
    child = serving.fork(parent, 8)
    batch = serving.batch([child, other], [2, 2])
    kv_len = torch.tensor([8, 5], dtype=torch.int32, device=serving.runtime.device)
    lengths = DeviceInputs(kv_len=kv_len, q_len=torch.full_like(kv_len, 2))
    serving.run_batch([child, other], [2, 2], replace(batch, inputs=lengths))
    serving.check_step([child, other], [2, 2])
    faults = []
    for _ in range(3):  # if a graph was made first, the batch was published twice
        try:
            serving.runtime.check_device()
        except DeviceFault as fault:
            faults.append(str(fault))
    assert faults
    assert all("let a step begin within the tokens that its row shares with another" in fault for fault in faults)
    serving.step([parent], [1])


class Fails(Exception):
    """The exception that a forward raises."""


def model(layers: int, device: torch.device) -> tuple[AttentionRuntime, Callable[[Part], Tensor], dict[str, int]]:
    """Returns a runtime, a forward that raises before the layer `fails_at`, and that number."""
    problem = Problem(2, 1, 8, torch.float32, 4, v_head_dim=8, scale=8**-0.5)
    runtime = build_runtime(
        [problem] * layers,
        RuntimeOptions(num_pages=32, max_num_seqs=4, max_kv_len=32, provider="torch", capture_sizes=(1, 2)),
        device=device,
    )
    embedding = torch.randn(50, 3, 8, generator=torch.Generator().manual_seed(1)).to(runtime.device)
    plan = {"fails_at": -1}

    def forward(step: Part) -> Tensor:
        x = embedding.index_select(0, step.token_ids)
        q, k, v = x[:, :2].contiguous(), x[:, 1:2].contiguous(), x[:, 2:3].contiguous()
        out = torch.empty_like(q)
        for layer in range(layers):
            if layer == plan["fails_at"]:
                raise Fails
            step.layers.store_and_attend(layer, q, k, v, out)
        return out.index_select(0, step.last_token_of_seq)

    return runtime, forward, plan


def tokens(row: int, kv_len: int, q_len: int) -> StepBatch:
    ids = np.arange(kv_len - q_len, kv_len, dtype=np.int32) % np.int32(49) + np.int32(1)
    return StepBatch(np.array([row]), np.array([kv_len]), np.array([q_len]), ids)


@pytest.mark.fast
@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_step_that_raised_half_way_is_run_again_before_the_next(
    fails_at: int, graphs: bool, device: torch.device
) -> None:
    runtime, forward, plan = model(3, device)
    runner = StepRunner(runtime, forward, recorder_for(runtime.device) if graphs else None)
    row = runtime.table.admit()
    runtime.table.reserve(row, 12)
    runner.run(tokens(row, 5, 5))
    plan["fails_at"] = fails_at
    with pytest.raises(Fails):
        runner.run_eagerly(tokens(row, 6, 1))
    plan["fails_at"] = -1
    with pytest.raises(BadBatch, match="the first 6 tokens of row 1, of which 5 are stored in every layer"):
        runner.run(tokens(row, 7, 1))
    once = runner.run(tokens(row, 6, 1)).clone()
    assert torch.equal(runner.run(tokens(row, 6, 1)), once)
    runner.run(tokens(row, 7, 1))
    runner.run(tokens(row, 8, 1))
    # Tokens that some layers have overwritten are gone, and so are those after them.
    plan["fails_at"] = fails_at
    with pytest.raises(Fails):
        runner.run_eagerly(tokens(row, 5, 2))
    plan["fails_at"] = -1
    if fails_at:
        with pytest.raises(BadBatch, match="the first 8 tokens of row 1, of which 3 are stored"):
            runner.run(tokens(row, 9, 1))
    else:
        runner.run(tokens(row, 9, 1))


def test_attending_before_storing_is_refused(device: torch.device) -> None:
    runtime, _, _ = model(2, device)
    row = runtime.table.admit()
    runtime.table.reserve(row, 4)
    step = runtime.step(tokens(row, 4, 4)).parts[0]
    q = torch.zeros(step.token_ids.shape[0], 2, 8, device=runtime.device)
    k = q[:, :1]
    step.layers.store(0, k, k)
    step.layers.attend(0, q, torch.empty_like(q))
    with pytest.raises(BadBatch, match="the first 4 tokens of row 1, of which 0 are stored"):
        step.layers.attend(1, q, torch.empty_like(q))
    step.layers.store(1, k, k)
    step.layers.attend(1, q, torch.empty_like(q))
    runtime.end_step()


def test_a_row_that_is_freed_in_a_running_step_is_empty_for_the_next_request(device: torch.device) -> None:
    runtime, forward, _ = model(1, device)
    rows = [runtime.table.admit() for _ in range(2)]
    for row in rows:
        runtime.table.reserve(row, 4)
    step = runtime.step(
        StepBatch(np.array(rows), np.array([4, 4]), np.array([4, 4]), np.arange(8, dtype=np.int32))
    ).parts[0]
    forward(step)
    runtime.table.free(rows[0])
    assert runtime.table.admit() == rows[0]
    runtime.table.reserve(rows[0], 8)
    runtime.end_step()
    with pytest.raises(BadBatch, match=r"the first 4 tokens of row \d, of which 0 are stored"):
        runtime.step(tokens(rows[0], 5, 1))
    runtime.table.reserve(rows[1], 5)
    runtime.step(tokens(rows[1], 5, 1))
    runtime.end_step()


def test_kv_that_came_by_other_means_is_marked(device: torch.device) -> None:
    runtime, forward, _ = model(1, device)
    table = runtime.table
    row = table.admit()
    table.reserve(row, 9)
    with pytest.raises(BadBatch, match="row 1 has room for 9 tokens; 10 of them cannot be stored"):
        table.mark_stored(np.array([row]), np.array([10]))
    with pytest.raises(WrongState, match="row 2 is not admitted"):
        table.mark_stored(np.array([2]), np.array([1]))
    table.mark_stored(np.array([row]), np.array([8]))
    child = table.fork(row, 6)
    table.reserve(child, 8)
    forward(runtime.step(tokens(row, 9, 1)).parts[0])
    runtime.end_step()
    with pytest.raises(BadBatch, match="the first 7 tokens of row 2, of which 6 are stored"):
        runtime.step(tokens(child, 8, 1))
    forward(runtime.step(tokens(child, 8, 2)).parts[0])
    runtime.end_step()


def test_tokens_that_a_row_went_back_from_are_not_stored(device: torch.device) -> None:
    runtime, forward, _ = model(1, device)
    table = runtime.table
    row = table.admit()
    table.reserve(row, 9)
    forward(runtime.step(tokens(row, 8, 8)).parts[0])
    runtime.end_step()
    table.truncate(row, 5)
    table.reserve(row, 9)
    with pytest.raises(BadBatch, match="the first 8 tokens of row 1, of which 5 are stored"):
        runtime.step(tokens(row, 9, 1))
    forward(runtime.step(tokens(row, 9, 4)).parts[0])
    runtime.end_step()


def test_a_row_goes_back_no_further_than_its_room(device: torch.device) -> None:
    runtime, _, _ = model(1, device)
    table = runtime.table
    row = table.admit()
    table.reserve(row, 9)
    with pytest.raises(BadBatch, match="row 1 has room for 9 tokens; it cannot go back to 10"):
        table.truncate(row, 10)
    table.truncate(row, 5)
    assert len(table.pages_of(row)) == 2
    assert table.full.num_free_pages == table.full.num_usable_pages - 2
    table.truncate(row, 0)
    assert table.full.num_free_pages == table.full.num_usable_pages
    table.reserve(row, 3)
    table.free(row)
    with pytest.raises(WrongState, match="row 1 is not admitted"):
        table.truncate(row, 0)


@pytest.mark.parametrize("forks_first", [False, True])
def test_what_a_step_stores_again_is_stored_for_no_row_that_is_forked_meanwhile(forks_first: bool) -> None:
    """Some layers have the new K and V by then, and others the old ones."""
    options = RuntimeOptions(num_pages=20, max_num_seqs=2, max_kv_len=32, max_num_rows=4, provider="torch")
    runtime = build_runtime([small_problem()] * 2, options, device="cpu")
    row = runtime.table.admit()
    runtime.table.reserve(row, 8)
    with runtime.step(StepBatch([row], [8], [8])) as step:
        padded = torch.zeros(len(step.parts[0].token_ids), 2, 16)
        for layer in range(2):
            step.parts[0].layers.store(layer, padded, padded)
    with runtime.step(StepBatch([row], [8], [1])):
        before = runtime.table.fork(row, 8)
        assert runtime.table.tokens.stored_len[before] == 8, "the step has stored nothing yet"
        runtime.table.free(before)
    runtime.table.reserve(row, 9)
    with runtime.step(StepBatch([row], [9], [1])) as step:
        runtime.table.free(runtime.table.fork(row, 8))
        step.parts[0].layers.store(0, padded[:1], padded[:1])  # after all that the fork reads
    with runtime.step(StepBatch([row], [8], [1])) as step:
        padded = torch.ones(len(step.parts[0].token_ids), 2, 16)
        step.parts[0].layers.store(0, padded, padded)
        child = runtime.table.fork(row, 8) if forks_first else -1
        with pytest.raises(BadBatch, match="has 7 stored tokens, which fill the pages before page_no 1"):
            runtime.table.kept.keep(row, 0, 2)
        child = child if forks_first else runtime.table.fork(row, 8)
        with pytest.raises(BadBatch, match="was forked or kept while its step runs"):
            step.parts[0].layers.store(1, padded, padded)
    assert runtime.table.tokens.stored_len[[row, child]].tolist() == [7, 7]


def test_a_step_stores_no_more_once_its_own_row_was_cut_or_freed() -> None:
    options = RuntimeOptions(num_pages=20, max_num_seqs=2, max_kv_len=32, provider="torch")
    runtime = build_runtime([small_problem()], options, device="cpu")
    row, other = runtime.table.admit(), runtime.table.admit()
    runtime.table.reserve(row, 9)
    with runtime.step(StepBatch([row], [8], [8])) as step:
        padded = torch.zeros(len(step.parts[0].token_ids), 2, 16)
        runtime.table.truncate(row, 8)
        runtime.table.free(other)
        step.parts[0].layers.store(0, padded, padded)
        runtime.table.truncate(row, 7)
        with pytest.raises(BadBatch, match="row 1 was freed, or cut to 7 tokens, while its step runs"):
            step.parts[0].layers.store(0, padded, padded)
