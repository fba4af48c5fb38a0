"""Recurrent layers: outputs are those of a recurrence over the request's tokens, however steps cut and mix them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.mask import TreeMask
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadBatch, BadProblem, BadSetting, BadTensor, DeviceFault, NeverFits, WrongState
from rocm_attn.paging.state_pool import RecurrentLayers, StateCopy
from rocm_attn.step import state_layers
from rocm_attn.step.gate import AGAIN
from rocm_attn.step.step import Step
from tests.amd.worlds.hybrid import ALL_KINDS, GATED_DELTA, KEPT, PAGE_SIZE, SUMS, Hybrid
from tests.amd.worlds.problems import deterministic_providers


def test_a_row_that_went_back_for_a_step_that_stored_nothing_goes_on_from_there(
    provider: str, device: torch.device
) -> None:
    """Fill has given a slot to that step, which nothing was written to."""
    world = Hybrid(device, provider)
    one = world.admit()
    for count in (7, KEPT):
        world.step([one], [world.ids(count)])
    before = list(one.ids)
    del one.ids[8:]
    with world.runtime.step(world.batch([one], [world.ids(KEPT)])):
        pass
    one.ids = before
    with pytest.raises(BadBatch, match="its last step did not store in layer 0, the convolution of recurrent layer 0"):
        world.run([one], [world.ids(1)])
    del one.ids[8:]
    world.step([one], [world.ids(2)])
    world.runtime.check_device()


def test_a_fork_after_a_forward_that_failed_half_way_has_the_state_before_it(
    provider: str, device: torch.device
) -> None:
    world = Hybrid(device, provider)
    (one,) = world.begun(6)
    with world.runtime.step(world.batch([one], [world.ids(1)])) as step:  # it ends before the other layers
        world.recur(step.parts[0], 0)
    child = type(one)(world.runtime.table.fork(one.row, 6), list(one.ids))
    world.step([child, one], [world.ids(1), world.ids(2)])
    world.runtime.check_device()


def test_a_copy_that_was_made_before_another_one_raised_is_not_made_again(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that was freed after its fork gets the state of a checkpoint, so its fork would find none a second time."""
    world = Hybrid(device, "torch")
    table, (one,) = world.runtime.table, world.begun(PAGE_SIZE)
    ids = table.kept.keep(one.row, 0, 1)
    world.step([one], [world.ids(1)])
    child = type(one)(table.fork(one.row, len(one.ids)), list(one.ids))
    table.free(one.row)
    late = type(one)(table.kept.admit_over(ids, PAGE_SIZE), one.ids[:PAGE_SIZE])
    assert late.row == one.row
    last = type(one)(table.fork(child.row, len(child.ids)), list(child.ids))
    states, make, made = world.runtime.states, world.runtime.states.copy, list[StateCopy]()

    def copy(of: StateCopy) -> None:
        if len(made) == 2:
            made.append(of)
            raise torch.OutOfMemoryError("no room for a slot")
        made.append(of)
        make(of)

    monkeypatch.setattr(states, "copy", copy)
    requests = [child, late, last]
    new = [world.ids(1) for _ in requests]
    with pytest.raises(torch.OutOfMemoryError):
        world.run(requests, new)
    world.step(requests, new)
    assert len(made) == 4
    world.runtime.check_device()


def test_forks_checkpoints_and_rows_that_begin_at_them(provider: str, device: torch.device) -> None:
    world = Hybrid(device, provider)
    table, one = world.runtime.table, world.admit()
    world.step([one], [world.ids(2 * PAGE_SIZE)])
    ids = table.kept.keep(one.row, 0, 2)
    assert table.kept.have_states(ids).tolist() == [False, True]
    world.step([one], [world.ids(1)])
    child = type(one)(table.fork(one.row, len(one.ids)), list(one.ids))
    world.step([one, child], [world.ids(1), world.ids(5)])
    world.step([child, one], [world.ids(1), world.ids(1)])
    begun = table.fork(one.row, len(one.ids)), table.kept.admit_over(ids, 2 * PAGE_SIZE)
    for row, tokens in zip(begun, (len(one.ids), 2 * PAGE_SIZE), strict=True):
        table.truncate(row, tokens - 1)
        with pytest.raises(BadBatch, match=f"whose state is there after {tokens} tokens"):
            world.run([type(one)(row, one.ids[: tokens - 1])], [world.ids(1)])
        table.free(row)
    table.free(one.row)
    table.free(table.kept.admit_over([], 0))
    with pytest.raises(BadBatch, match=r"recurrent layers have no state after 7 kept tokens; begin after 8 tokens"):
        table.kept.admit_over(ids, 2 * PAGE_SIZE - 1)
    for _ in range(2):  # two rows go on from one checkpoint
        late = type(one)(table.kept.admit_over(ids, 2 * PAGE_SIZE), one.ids[: 2 * PAGE_SIZE])
        world.step([late], [world.ids(3)])
    table.kept.drop(ids)
    world.step([child, late], [world.ids(1), world.ids(1)])
    with pytest.raises(BadBatch, match=r"recurrent layers have no state after 4 kept tokens; begin after no tokens"):
        table.kept.admit_over(table.kept.keep(child.row, 0, 1), PAGE_SIZE)
    world.runtime.check_device()


def test_a_row_without_new_tokens_keeps_its_track_in_a_step_of_lengths_on_the_device(device: torch.device) -> None:
    """A checkpoint of a state that was never there was kept, and the step of a row over it was a fault."""
    world = Hybrid(device, "torch")
    idle, other = world.begun(PAGE_SIZE + 2, 3)
    batch = world.batch([idle, other], [[], world.ids(1)])
    lengths = torch.tensor(batch.kv_len, device=device)
    world.runner.run(replace(batch, inputs=DeviceInputs(kv_len=lengths)))
    kept = world.runtime.table.kept
    assert kept.have_states(kept.keep(idle.row, 0, 1)).tolist() == [False]
    world.step([idle], [world.ids(1)])
    world.runtime.check_device()


def test_the_first_graph_of_new_tokens_known_on_the_device_forgets_no_stored_ones(device: torch.device) -> None:
    """The step waits while its graph is made. It was moved back to the first token that its bound allowed."""
    world = Hybrid(device, "torch", graphs=True)
    (one,) = world.begun(6)
    new = world.ids(2)
    world.runtime.table.reserve(one.row, 8)
    inputs = DeviceInputs(q_len=torch.tensor([2], dtype=torch.int32, device=device))
    out = world.runner.run(StepBatch([one.row], [8], [3], [*new, 0], inputs=inputs)).tensor[:2]
    assert world.runner.graph_of_last is not None
    one.ids += new
    world.check(out, [one], [new])
    world.runtime.check_device()


def test_a_checkpoint_is_taken_one_step_late(provider: str, device: torch.device) -> None:
    world = Hybrid(device, provider)
    kept, one = world.runtime.table.kept, world.admit()
    world.step([one], [world.ids(PAGE_SIZE)])
    world.step([one], [world.ids(1)])
    ids = kept.keep(one.row, 0, 1)
    assert kept.have_states(ids).all()
    world.step([one], [world.ids(1)])
    assert not kept.have_states(kept.keep(one.row, 0, 1)).any()  # two steps later it is gone
    child = type(one)(world.runtime.table.fork(one.row, PAGE_SIZE), one.ids[:PAGE_SIZE])
    with pytest.raises(BadBatch, match="goes on after 4 tokens of row 2, whose state is there for no token"):
        world.run([child], [world.ids(1)])
    late = type(one)(kept.admit_over(ids, PAGE_SIZE), one.ids[:PAGE_SIZE])
    world.step([late, one], [world.ids(1), world.ids(1)])
    assert not kept.have_states(kept.keep(one.row, 0, 1)).any()


def test_a_fault_that_keeps_a_step_from_beginning_leaves_the_states_of_its_rows(device: torch.device) -> None:
    """The host took the slot for that step's, which held the state before the last one."""
    world = Hybrid(device, "torch")
    one, other = world.begun(8, 3)
    world.step([one], [world.ids(KEPT + 1)])
    world._kv[7] = float("nan")
    world.run([other], [[7]])
    for _ in range(2):
        world.run([one], [world.ids(KEPT + 1)])
    with pytest.raises(DeviceFault):
        world.run([one], [world.ids(KEPT + 1)])
    world.back(one, len(one.ids) - KEPT - 1)
    world.step([one], [world.ids(2)])


def test_no_checkpoint_is_kept_of_a_state_that_only_the_device_knows_of(device: torch.device) -> None:
    """It was counted as kept where no state was, and each step of a row over it was a fault."""
    world = Hybrid(device, "torch")
    (one,) = world.begun(PAGE_SIZE - 1)
    new = world.ids(KEPT + 3)  # these are folded, so the state after the first page is nowhere
    batch = world.batch([one], [new])
    world.runner.run(replace(batch, inputs=DeviceInputs(kv_len=torch.tensor(batch.kv_len, device=device))))
    one.ids += new
    kept = world.runtime.table.kept
    child = type(one)(world.runtime.table.fork(one.row, PAGE_SIZE), one.ids[:PAGE_SIZE])
    for row in (one.row, child.row):
        assert kept.states_due([row], [0]).tolist() == [False]
        assert kept.have_states(kept.keep(row, 0, 1)).tolist() == [False]
    for _ in range(2):
        world.step([one], [world.ids(1)])
    world.step([one], [world.ids(2 * PAGE_SIZE - len(one.ids) % PAGE_SIZE)])
    last = len(one.ids) // PAGE_SIZE - 1
    assert kept.have_states(kept.keep(one.row, last, last + 1)).tolist() == [True]


def test_a_step_that_may_not_store_leaves_the_state_of_its_row(device: torch.device) -> None:
    """It would begin anew in a page that another row holds, and take both slots of its row."""
    world = Hybrid(device, "torch")
    (one,) = world.begun(6)
    world.runtime.table.fork(one.row, 6)
    again = type(one)(one.row)
    with pytest.raises(BadBatch, match="would store token 0 of row 1 in a page that another row or"):
        world.run([again], [world.ids(3)])
    world.step([one], [world.ids(2)])
    world.runtime.check_device()


def test_a_step_that_may_not_run_again_leaves_what_the_host_knows_of_its_rows(device: torch.device) -> None:
    world = Hybrid(device, "torch")
    (one,) = world.begun(9)
    other = world.batch([one], [world.ids(1)])
    with pytest.raises(WrongState, match="AGAIN was given with another batch"):
        world.runtime.step(other, AGAIN)
    world.back(one, 5)
    with pytest.raises(BadBatch, match="after 5 tokens of row 1, whose state is there after 9 tokens"):
        world.run([one], [world.ids(1)])


@pytest.mark.parametrize("goes_back", [True, False])
def test_tokens_that_steps_of_device_lengths_stored_are_not_from_elsewhere(
    goes_back: bool, device: torch.device
) -> None:
    """A step that runs again moves the lengths on by itself; mark_stored() then counts its tokens, in the same row."""
    world = Hybrid(device, "torch")
    (one,) = world.begun(6)
    batch = world.batch([one], [[7]])
    world.runtime.table.reserve(one.row, 9)
    lengths = torch.tensor([7], dtype=torch.int32, device=device)
    batch = replace(batch, inputs=DeviceInputs(kv_len=lengths, ahead=0))
    world.runner.run(batch)
    with world.runtime.stage(batch, AGAIN) as step:
        step.children[0].tensors.kv_len[0] = 8
        step.fill()
        world.forward(step.parts[0])
    world.runtime.check_device()
    if goes_back:
        world.runtime.table.truncate(one.row, 6)
        world.runtime.table.reserve(one.row, 9)
        world.runtime.table.truncate(one.row, 9)
    world.runtime.table.mark_stored([one.row], [8])
    one.ids += [7, 7]
    if goes_back:
        with pytest.raises(BadBatch, match="goes on after 8 tokens of row 1, whose state is there for no token"):
            world.run([one], [world.ids(1)])
    else:
        world.step([one], [world.ids(1)])
        world.runtime.check_device()


def test_tokens_of_a_step_of_device_lengths_that_failed_half_way_are_from_elsewhere(device: torch.device) -> None:
    """Fill has given them a slot, which nothing was written to: a row went on from the memory that was there."""
    world = Hybrid(device, "torch")
    one, idle = world.begun(6, 6)

    def step(*args: Sequence[int]) -> Step:
        batch = StepBatch(*args)
        world.runtime.table.reserve_all(batch.rows, batch.kv_len)
        lengths = torch.tensor(batch.kv_len, device=device)
        return world.runtime.step(replace(batch, inputs=DeviceInputs(kv_len=lengths)))

    with step([idle.row], [7], [1], [5]) as whole:
        world.forward(whole.parts[0])
    idle.ids += [5]
    with step([one.row, idle.row], [7, 3], [1, 0], [7]):
        pass
    world.runtime.table.mark_stored([one.row], [7])
    one.ids += [7]
    world.step([idle], [world.ids(1)])  # it had no new token in the step that failed
    with pytest.raises(BadBatch, match="goes on after 7 tokens of row 1, whose state is there for no token"):
        world.run([one], [world.ids(1)])


@pytest.mark.parametrize("on_host", [True, False], ids=["the host", "the device"])
def test_tokens_that_no_step_has_stored_end_the_state_of_their_row(on_host: bool, device: torch.device) -> None:
    """Its slots have the state after as many tokens: others, which were taken back."""
    world = Hybrid(device, "torch")
    (one,) = world.begun(8)
    table = world.runtime.table
    world.step([one], [world.ids(1)])
    for no_more in (9, 8):
        table.mark_stored([one.row], [no_more])
        one.ids = one.ids[:8]
        world.step([one], [world.ids(1)])
    table.truncate(one.row, 6)
    table.reserve(one.row, 10)
    table.mark_stored([one.row], [9])
    batch = world.batch([one], [world.ids(1)])
    if on_host:
        with pytest.raises(BadBatch, match="goes on after 9 tokens of row 1, whose state is there for no token"):
            world.runner.run(batch)
    else:
        lengths = torch.tensor(batch.kv_len, device=device)
        world.runner.run(replace(batch, inputs=DeviceInputs(kv_len=lengths, ahead=0)))
        with pytest.raises(DeviceFault, match="the state of a row is not the one before the new tokens"):
            world.runtime.check_device()
    one.ids = []
    world.step([one], [world.ids(2)])
    world.runtime.check_device()


@pytest.mark.parametrize("on_host", [True, False], ids=["the host", "the device"])
def test_a_state_with_rejected_tokens_serves_none_that_were_stored_anew(
    on_host: bool, provider: str, device: torch.device
) -> None:
    """One of three tokens after the tenth stays, and the next step is long: the older slot has two wrong tokens."""
    world = Hybrid(device, provider)
    (one,) = world.begun(10)
    world.step([one], [world.ids(3)])
    world.back(one, 11)
    world.step([one], [world.ids(9)])
    world.back(one, 12)
    assert not world.runtime.table.states.are_due(np.array([one.row], np.int32), np.array([12], np.int32))[0]
    batch = world.batch([one], [world.ids(1)])
    if on_host:
        with pytest.raises(
            BadBatch, match=r"goes on after 12 tokens of row 1, whose state is there after 20 tokens or 11 tokens; "
        ):
            world.runner.run(batch)
    else:
        child = world.runtime.table.fork(one.row, 12)  # copied on the device, which finds no state
        world.runtime.table.reserve(child, 13)
        lengths = torch.tensor([13], dtype=torch.int32, device=device)
        rows = np.array([child], np.int32)
        inputs = DeviceInputs(kv_len=lengths, ahead=0)
        assert not world.runner.run(
            type(batch)(rows, batch.kv_len, batch.q_len, batch.token_ids, inputs=inputs)
        ).tensor.any()
        with pytest.raises(DeviceFault, match="the state of a row is not the one before the new tokens"):
            world.runtime.check_device()
    world.back(one, 11)
    world.step([one], [world.ids(2)])


def test_the_device_refuses_lengths_that_lead_to_another_state(provider: str, device: torch.device) -> None:
    world = Hybrid(device, provider)
    one, other = world.begun(8, 8)
    before = world.runtime.states.memory.clone()
    batch = world.batch([one, other], [world.ids(1), world.ids(1)])
    lengths = torch.tensor([9, 6], dtype=torch.int32, device=device)
    batch = type(batch)(
        batch.rows, batch.kv_len, batch.q_len, batch.token_ids, inputs=DeviceInputs(kv_len=lengths, ahead=0)
    )
    out = world.runner.run(batch).tensor
    assert not out[1].any()
    row = slice(2 * other.row, 2 * other.row + 2)
    assert torch.equal(world.runtime.states.memory[row], before[row])
    with pytest.raises(DeviceFault, match="the state of a row is not the one before the new tokens"):
        world.runtime.check_device()


@pytest.mark.parametrize("provider", deterministic_providers())
def test_deterministic_bits_depend_on_no_chunk_and_no_batch(provider: str, device: torch.device) -> None:
    world = Hybrid(device, provider, deterministic=True)
    one, other = world.admit(), world.admit()
    ids = world.ids(11)
    whole = world.run([one], [ids])
    parts, begin = [], 0
    for count in (1, 5, 2, 3):
        parts.append(world.run([other], [ids[begin : begin + count]]))
        begin += count
    assert torch.equal(whole, torch.cat(parts))


def test_pads_write_no_state(device: torch.device) -> None:
    world = Hybrid(device, "torch", graphs=True)
    requests = [world.admit() for _ in range(3)]  # padded to 4
    world.step(requests, [world.ids(1) for _ in requests])
    world.step(requests, [world.ids(1) for _ in requests])
    assert not world.runtime.states.memory[:2].any()
    assert not world.runtime.states.headers[:2].any()


def test_a_step_that_leaves_out_a_layer_has_not_stored(device: torch.device) -> None:
    world = Hybrid(device, "torch", layers=(GATED_DELTA, SUMS))
    one = world.admit()
    with world.runtime.step(world.batch([one], [world.ids(4)])) as step:
        part = step.parts[0]
        rows = torch.zeros(len(part.token_ids), 2, 16, device=device)
        part.layers.store(0, rows, rows)
        world.recur(part, 0)
    one.ids += world.ids(4)
    with pytest.raises(
        BadBatch, match="its last step did not store in the convolution of recurrent layer 1, the state"
    ):
        world.run([one], [world.ids(1)])


def test_rounds_of_drafts_and_masks_are_refused(device: torch.device) -> None:
    """A state goes on token after token, whatever the tokens of a tree or of a branch see."""
    runtime = Hybrid(device, "torch").runtime
    row = runtime.table.admit()
    runtime.table.reserve(row, 8)
    chain = StepBatch([row], [2], [2])
    tree = TreeMask(torch.tensor([[-1, 0]], dtype=torch.int32, device=device))
    for wrong in (replace(chain, mask=tree), replace(chain, drafts=Drafts(1, 2))):
        with pytest.raises(BadBatch, match="is a round of drafts or has a mask"):
            runtime.step(wrong)


def test_wrong_arguments_are_named(device: torch.device) -> None:
    world = Hybrid(device, "torch")
    one = world.admit()
    with world.runtime.step(world.batch([one], [world.ids(4)])) as step:
        part = step.parts[0]
        rows = torch.zeros(len(part.token_ids), 2, 8, device=device)
        scalars = torch.zeros(len(part.token_ids), 2, device=device)
        for layer in (3, -1, None):
            with pytest.raises(BadTensor, match=rf"recurrent layer {layer} does not exist; the runtime has 0 to 2"):
                part.states.recur(layer, rows, rows, rows, rows, scalars, rows)  # type: ignore[arg-type]
        with pytest.raises(BadTensor, match="decay has shape"):
            part.states.recur(1, rows, rows, rows, scalars, scalars, rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state_layers, "MOST_TOKEN_STRIDE", 31)
            near = rows.clone(), rows.clone()
            far = torch.zeros(len(rows), 4, 8, device=device)[:, :2]
            with pytest.raises(BadTensor, match="k has stride 32 between tokens; at most 31 is read"):
                part.states.recur(1, near[0], far, near[1], torch.zeros_like(rows), scalars, rows)
        with pytest.raises(BadTensor, match="recurrent layer 1 has no convolution"):
            part.states.convolve(1, scalars, scalars, None, scalars)
        x, weight = (world.layers[0].x[: len(rows)], world.layers[0].weight)
        with pytest.raises(BadTensor, match="out shares memory with x"):
            part.states.convolve(0, x, weight, None, x)  # a block of tokens read what another had written
        q, v = torch.zeros(2, len(rows), 2, 8, device=device)
        decays = torch.zeros(len(rows), 2, 8, device=device)
        for name in ("q", "k", "v"):  # the state is computed from them after the outputs
            given = {"q": q, "k": rows, "v": v}
            with pytest.raises(BadTensor, match=f"out shares memory with {name}"):
                part.states.recur(1, **given, decay=decays, beta=scalars, out=given[name])
    with pytest.raises(BadSetting, match="kept of recurrent layers is 0; it must be 1 or more"):
        RecurrentLayers(ALL_KINDS, kept=0)
    for layers in (None, GATED_DELTA, [None]):
        with pytest.raises(BadSetting, match="give a list with a Recurrence for each recurrent layer"):
            RecurrentLayers(layers)  # type: ignore[arg-type]
    with pytest.raises(NeverFits, match=f"checkpoints of recurrent layers is {2**31}; slots are int32"):
        Hybrid(device, "torch", checkpoints=2**31)
    with pytest.raises(BadProblem, match="3 heads over 2 heads of k"):
        replace(GATED_DELTA, num_heads=3)
    for wrong in ({"k_dim": 0}, {"dtype": torch.int32}, {"scale": -1.0}, {"update": "delta"}, {"normalises": 1}):
        with pytest.raises(BadProblem, match=next(iter(wrong))):
            replace(GATED_DELTA, **wrong)
    for name, value in (("k_dim", "8"), ("scale", None), ("scale", "1"), ("convolution", 4)):
        with pytest.raises(BadProblem, match=name):
            replace(GATED_DELTA, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(
        BadProblem, match=f"a state of 4 heads, k_dim {2**31 - 1} and .* at most {2**31 - 1} are served"
    ):
        replace(GATED_DELTA, num_heads=4, num_k_heads=4, k_dim=2**31 - 1)  # bytes of its slots overflow an int64
    with pytest.raises(BadProblem, match=f"a convolution of 2 channels and width {2**30} keeps {2**31} elements"):
        replace(GATED_DELTA.convolution, channels=2, width=2**30)
    with pytest.raises(BadProblem, match="silu is 'no'"):
        replace(GATED_DELTA.convolution, silu="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("num_tokens", [6, 7, 8])
def test_a_refused_step_names_only_tokens_after_which_a_step_may_go_on(num_tokens: int, device: torch.device) -> None:
    """It named the first new token of the last but one step too: the state before that step is overwritten."""
    world = Hybrid(device, "torch")
    (one,) = world.begun(6)
    for _ in range(2):
        world.step([one], [world.ids(1)])
    world.back(one, num_tokens)
    if num_tokens == 6:
        with pytest.raises(BadBatch, match="after 6 tokens of row 1, whose state is there after 8 tokens or 7 tokens;"):
            world.run([one], [world.ids(1)])
    else:
        world.step([one], [world.ids(1)])
