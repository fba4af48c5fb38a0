"""Split steps on the runtime: each half sees its own sequences, for any sizes; tests/amd/random_calls has more."""

import re

import pytest
import torch

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.padding import PadTo
from rocm_attn.errors import BadSetting, BadTensor, CapacityExceeded, DeviceFault, WrongState
from tests.amd.worlds.hybrid import GATED_DELTA, KEPT, Hybrid
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import World

pytestmark = pytest.mark.fast(interpreted=0)


def test_calls_on_the_wrong_half_or_step_are_refused_in_one_sentence(provider: str, device: torch.device) -> None:
    problems = [small_problem(), small_problem(num_q_heads=4, v_head_dim=8)]
    world = World.build(problems, device, provider, max_num_seqs=5, capture_sizes=(2, 8))
    requests = [world.admit() for _ in range(3)]
    rows = torch.zeros(4, 2, 16, device=device)
    batch = world.batch(requests, [1, 1, 1])
    staged = world.runtime.stage(batch, world.runtime.plan(batch, halves=2))
    with pytest.raises(WrongState, match="staged and its metadata is not filled"):
        staged.parts[0].layers.store(0, rows, rows)
    world.runtime.gate.fill()
    with pytest.raises(BadTensor, match=r"k has shape \[3, 2, 16\]; this step and layer need \[4, 2, 16\]"):
        staged.parts[1].layers.store(0, rows[:3], rows)
    batch = world.batch(requests, [0, 0, 0])
    with pytest.raises(WrongState, match=r"call end_step\(\) first"):
        world.runtime.stage(batch, world.runtime.plan(batch, halves=2))
    world.runtime.end_step()
    with pytest.raises(WrongState, match="no step was begun"):
        staged.parts[0].layers.attend(0, rows, rows)
    for halves in (1, 2):
        world.runtime.step(batch, world.runtime.plan(batch, halves=halves))
        with pytest.raises(WrongState, match="the step of these layers has ended"):
            staged.parts[0].layers.store(0, rows, rows)
        world.runtime.end_step()
    for number in (0, 3, -1, 1.5, [1], None):
        with pytest.raises(BadSetting, match=re.escape(f"halves is {number}; it must be 1, or 2")):
            world.runtime.plan(batch, halves=number)  # type: ignore[arg-type]
    with pytest.raises(CapacityExceeded, match="pad to an even number"):
        world.runtime.plan(batch, PadTo(7), halves=2)
    world.step(requests, [1, 1, 1], halves=True)


def test_halves_go_on_from_the_states_of_their_own_sequences(graphs: bool, provider: str, device: torch.device) -> None:
    """Prompts, mixed steps, decodes and verify steps with drafts taken back, split and whole ones in turn."""
    world = Hybrid(device, provider, graphs=graphs, layers=(GATED_DELTA,))
    requests = [world.admit() for _ in range(4)]
    world.step(requests, [world.ids(count) for count in (7, 2, 5, 3)], halves=2)
    world.step(requests, [world.ids(count) for count in (1, 6, 1, 2)], halves=2)
    for count in (4, 3, 1, 2, 4):  # halves that are full, short and empty
        world.step(requests[:count], [world.ids(1) for _ in range(count)], halves=2)
        start = [len(each.ids) for each in requests]
        world.step(requests, [world.ids(KEPT) for _ in requests], halves=2)
        for seq, each in enumerate(requests):
            world.back(each, start[seq] + 1 + (seq + count) % KEPT)
        world.step(requests[::-1], [world.ids(1) for _ in requests])
    world.runtime.check_device()
    assert not graphs or world.runner.metrics.replays > 10


@pytest.mark.parametrize("wrong", [0, 3])
def test_a_wrong_state_in_one_half_leaves_the_other_half_right(wrong: int, provider: str, device: torch.device) -> None:
    """Only the device knows the lengths. One of them goes back to a token whose state is gone."""
    world = Hybrid(device, provider)
    requests = world.begun(8, 8, 8, 8)
    new = [world.ids(1) for _ in requests]
    batch = world.batch(requests, new)
    lengths = torch.tensor(batch.kv_len)
    lengths[wrong] -= 3
    inputs = DeviceInputs(kv_len=lengths.to(device), ahead=0)
    split = type(batch)(batch.rows, batch.kv_len, batch.q_len, batch.token_ids, inputs=inputs)
    row = slice(2 * requests[wrong].row, 2 * requests[wrong].row + 2)
    before = world.runtime.states.memory[row].clone()
    out = world.runner.run(split, halves=2).tensor
    assert not out[wrong].any()
    assert torch.equal(world.runtime.states.memory[row], before)
    for each, ids in zip(requests, new, strict=True):
        each.ids += ids
    right = [seq for seq in range(4) if seq != wrong]
    world.check(out[right], [requests[seq] for seq in right], [new[seq] for seq in right])
    with pytest.raises(DeviceFault, match="the state of a row is not the one before the new tokens"):
        world.runtime.check_device()
