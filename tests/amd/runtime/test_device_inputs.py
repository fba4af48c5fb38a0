"""Lengths and token ids that only the device knows: outputs are the reference's, and never out of bounds."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadBatch, BadTensor, DeviceFault, Unsupported
from rocm_attn.providers.contract import LayerKernel
from tests.amd.graphs.small_models import Tiny
from tests.amd.worlds.bounds import run_within_bounds
from tests.amd.worlds.world import Request, World

pytestmark = pytest.mark.fast(interpreted=0)


def ints(values: Sequence[int], like: World) -> Tensor:
    """Returns int32 on the device of a runtime."""
    return torch.tensor(values, dtype=torch.int32, device=like.runtime.device)


def serving_with_prompts(
    provider: str, device: torch.device, prompts: Sequence[int], *, graphs: bool
) -> tuple[World, list[Request]]:
    """Returns requests with these prompts; their later steps may be replayed, at one padded shape of each kind."""
    serving = World.one_layer(device, graphs=graphs, provider=provider, capture_tokens=(32,), num_pages=120)
    requests = serving.admit_all(len(prompts))
    serving.step(requests, prompts)
    return serving, requests


INT32 = st.integers(-(2**31), 2**31 - 1)


@settings(max_examples=15)
@example(kv_len=[0, 7], q_len=[0, 0])
@given(
    kv_len=st.lists(INT32 | st.integers(-2, 20), min_size=2, max_size=2), q_len=st.lists(INT32, min_size=2, max_size=2)
)
def test_no_value_on_the_device_leads_out_of_what_was_reserved(
    provider: str, device: torch.device, kv_len: list[int], q_len: list[int]
) -> None:
    """Two of three requests get any numbers; other requests' pages stay unchanged, and the host gets a report."""
    serving, requests = serving_with_prompts(provider, device, [5, 6, 7], graphs=False)
    table = serving.runtime.table
    serving.runtime.table.reserve_all(np.array([request.row for request in requests[:2]]), np.array([8, 8], np.int32))
    pages = serving.runtime.pool.layer(0)
    others = np.setdiff1d(np.arange(120), [table.pages_of(request.row) for request in requests[:2]])
    before = [side[others].nan_to_num(7.0) for side in (pages.k, pages.v)]
    batch = StepBatch(
        np.array([request.row for request in requests[:2]]),
        np.array([8, 8]),
        np.array([3, 2]),
        NO_TOKEN_IDS,
        inputs=DeviceInputs(kv_len=ints(kv_len, serving), q_len=ints(q_len, serving)),
    )
    for rows in vars(serving.rows[0]).values():
        rows.zero_()
    serving.runner.run(batch)
    of_seqs = list(zip(kv_len, q_len, (3, 2), (5, 6), strict=True))
    fits = all(0 <= new <= bound and new <= kv <= 8 for kv, new, bound, _ in of_seqs)
    goes_on = all(kv - new <= stored for kv, new, _, stored in of_seqs)
    for side, was in zip((pages.k, pages.v), before, strict=True):
        assert torch.equal(side[others].nan_to_num(7.0), was)
    if fits and goes_on:
        serving.runtime.check_device()
    else:
        says = (
            "let a step begin after the tokens" if fits else "step 2: a length on the device was outside of 0 <= q_len"
        )
        with pytest.raises(DeviceFault, match=says):
            serving.runtime.check_device()


def verified(tiny: Tiny, runner: StepRunner, prompt: int, num_seqs: int) -> tuple[Tensor, list[Tensor]]:
    """Returns rows and stored K and V of a step of which the device takes one token of up to four.

    The host's bounds are as loose as they may be: the last of four tokens would be one past the end.
    """
    requests = tiny.admitted(num_seqs)
    requests.run(runner, [prompt] * num_seqs)
    kv_len = [prompt + 1] * num_seqs
    for row in requests.rows:
        tiny.runtime.table.reserve(row, prompt + 2)
    most = np.full(num_seqs, 4, np.int32)
    rows, bounds = np.array(requests.rows, np.int32), np.array(kv_len, np.int32) + 1
    ids = torch.arange(1, 4 * num_seqs + 1, dtype=torch.int32, device=tiny.runtime.device)
    lengths = [torch.tensor(values, dtype=torch.int32).to(ids) for values in (kv_len, [1] * num_seqs)]
    inputs = DeviceInputs(kv_len=lengths[0], q_len=lengths[1], token_ids=ids)
    out = runner.run(StepBatch(rows, bounds, most, NO_TOKEN_IDS, inputs=inputs)).clone()
    requests.kv_len = kv_len
    tiny.runtime.check_device()
    return out, requests.stored()


@pytest.mark.parametrize("max_num_seqs", [8, 3], ids=["room for probes", "no row is free"])
def test_a_graph_for_lengths_on_the_device_is_checked_on_other_requests(
    max_num_seqs: int, provider: str, device: torch.device
) -> None:
    """The check never uses the step itself: the host does not know which of its tokens are new and which are stored."""
    found = []
    for graphs in (False, True):
        tiny = Tiny.build(device, provider, [4], (16,), max_num_seqs=max_num_seqs)
        runner = tiny.runner(graphs=graphs)
        found.append(verified(tiny, runner, 11, 3))
        assert runner.counters.graphs_off == ""
        assert runner.counters.replays == (1 if graphs and max_num_seqs > 3 else 0)
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


GAP = "let a step begin after the tokens that its row has stored"


def first_positions(
    serving: World, requests: Sequence[Request], kv_len: list[int], q_len: list[int], inputs: DeviceInputs
) -> list[int]:
    """Returns the positions of the first two tokens of a step that has stored nothing."""
    rows = np.array([request.row for request in requests], np.int32)
    serving.runtime.table.reserve_all(rows, np.array(kv_len, np.int32))
    batch = StepBatch(rows, np.array(kv_len), np.array(q_len), NO_TOKEN_IDS, inputs=inputs)
    positions: list[int] = serving.runtime.step(batch).parts[0].positions.tolist()[:2]
    serving.runtime.end_step()
    return positions


@pytest.mark.parametrize("given", [7, 10, 6])
def test_a_length_that_leaves_a_gap_is_cut_to_what_is_stored(provider: str, given: int, device: torch.device) -> None:
    """Five tokens are stored, and a step of one may have ten: later places in their pages belong to others."""
    serving, requests = serving_with_prompts(provider, device, [5, 3], graphs=False)
    inputs = DeviceInputs(kv_len=ints([given, 4], serving))
    assert first_positions(serving, requests, [10, 4], [1, 1], inputs) == [5, 3]
    with nullcontext() if given == 6 else pytest.raises(DeviceFault, match=GAP):
        serving.runtime.check_device()


def test_new_tokens_that_the_device_leaves_out_leave_no_gap(provider: str, device: torch.device) -> None:
    """The host has the length, and a bound on the new tokens: fewer would begin after the stored ones."""
    serving, (request,) = serving_with_prompts(provider, device, [5], graphs=False)
    inputs = DeviceInputs(q_len=ints([2], serving))
    assert first_positions(serving, [request], [8], [3], inputs) == [5, 6]
    with pytest.raises(DeviceFault, match=GAP):
        serving.runtime.check_device()


def test_a_step_without_sequences_may_have_inputs_on_the_device(provider: str, device: torch.device) -> None:
    serving, requests = serving_with_prompts(provider, device, [5, 2], graphs=False)
    nothing = ints([], serving)
    inputs = DeviceInputs(kv_len=nothing, q_len=nothing, token_ids=nothing)
    run_within_bounds(serving, [], [], kv_room=[], q_room=[], inputs=lambda kv_len: inputs)
    serving.check_step([], [])
    serving.step(requests, [1, 1])
    serving.runtime.check_device()


def test_tensors_that_do_not_fit_the_step_are_refused(provider: str, device: torch.device) -> None:
    serving = World.one_layer(device, graphs=False, provider=provider)
    lengths = ints([1, 1], serving)
    with pytest.raises(BadTensor, match=r"q_len is a torch.int64 tensor of shape"):
        DeviceInputs(q_len=lengths.long())
    with pytest.raises(BadTensor, match="kv_len is a list; give a tensor"):
        DeviceInputs(kv_len=[4])  # type: ignore[arg-type]
    with pytest.raises(BadTensor, match=r"kv_len is a torch.int32 tensor of shape .* contiguous int32 vector"):
        DeviceInputs(kv_len=ints([1, 2, 3, 4], serving)[::2])
    with pytest.raises(BadTensor, match="tensors are on no device"):
        DeviceInputs()
    with pytest.raises(BadTensor, match="meta; give kv_len"):
        DeviceInputs(kv_len=lengths, q_len=lengths.to("meta"))
    with pytest.raises(BadBatch, match=r"kv_len has 2 elements on the device; a step of 1 sequences .* needs 1"):
        StepBatch(np.array([1]), np.array([3]), np.array([1]), NO_TOKEN_IDS, inputs=DeviceInputs(kv_len=lengths))
    with pytest.raises(BadBatch, match=r"token_ids has 2 elements on the device; .* up to 3 new tokens needs 3"):
        StepBatch(np.array([1]), np.array([3]), np.array([3]), NO_TOKEN_IDS, inputs=DeviceInputs(token_ids=lengths))


def test_tensors_of_another_device_are_refused_before_the_step_begins(provider: str, device: torch.device) -> None:
    serving = World.one_layer(device, graphs=False, provider=provider)
    requests = serving.admit_all(1)
    batch = serving.batch(requests, [1])
    elsewhere = DeviceInputs(kv_len=torch.empty(1, dtype=torch.int32, device="meta"))
    for _ in range(2):
        with pytest.raises(BadTensor, match="the step's lengths or token ids are on meta; the runtime is on"):
            serving.runtime.stage(replace(batch, inputs=elsewhere))
    serving.step(requests, [1])


def test_a_kernel_that_must_know_lengths_on_the_host_is_named(provider: str, device: torch.device) -> None:
    serving = World.one_layer(device, graphs=False, provider=provider)
    (selection,) = serving.runtime.selections
    needy = {
        kind: LayerKernel(replace(kernel.entry, needs_host_lengths=True), kernel.bound)
        for kind, kernel in selection.kernels.items()
    }
    serving.runtime.gate.planner._selections = (replace(selection, kernels=needy),)
    requests = serving.begun(1)
    batch = serving.batch(requests, [1])
    for _ in range(2):
        with pytest.raises(Unsupported, match=f"{provider}.decode cannot run with the lengths of a step on"):
            serving.runtime.stage(replace(batch, inputs=DeviceInputs(kv_len=ints([2], serving))))
    # Token ids are not lengths.
    serving.runtime.stage(replace(batch, inputs=DeviceInputs(token_ids=ints([2], serving))))
    serving.runtime.end_step()
