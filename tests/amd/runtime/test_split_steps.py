"""Split steps on the runtime: each half sees its own sequences, for any sizes and either order of the halves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.padding import PadTo
from rocm_attn.errors import BadTensor, CapacityExceeded, DeviceFault, WrongState
from rocm_attn.step.step import Part, Step
from tests.amd.worlds.hybrid import GATED_DELTA, KEPT, Hybrid
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import Request, World, padded_to, page_zero_is_zero

pytestmark = pytest.mark.fast(interpreted=0)

# Ladders, and the sizes that a pool of 5 rows is padded to for 8 and 16 ranks.
LADDERS = [(2, 4), (1, 3, 5), (8,), (16,)]


def build(device: torch.device, provider: str, sizes: Sequence[int] = (2, 8), rows: int = 5) -> World:
    """Two layers of unlike heads."""
    problems = [small_problem(), small_problem(num_q_heads=4, v_head_dim=8)]
    return World.build(problems, device, provider, max_num_seqs=rows, capture_sizes=sizes)


def run_half(world: World, half: Part, layer: int, requests: Sequence[Request], q_len: Sequence[int]) -> None:
    """Runs one layer of one half with random q, k and v, NaN in the pads, and checks it against the reference."""
    problem = world.problems[layer]
    q, k, v = world.qkv(problem, half)
    world.remember(layer, requests, q_len, k, v)
    out = torch.full_like(q[..., : problem.v_head_dim], float("nan"))
    lse = torch.full(q.shape[:2], float("nan"), device=q.device)
    half.layers.store_and_attend(layer, q, k, v, out, lse)
    world.check(layer, requests, q_len, q, out, lse)


def split_step(
    world: World,
    requests: Sequence[Request],
    q_len: Sequence[int],
    pad_to: int | None = None,
    order: Sequence[tuple[int, int]] = ((0, 0), (0, 1), (1, 0), (1, 1)),
) -> Step:
    """Run a split step and check it. order: (half, layer), each once."""
    batch = world.batch(requests, q_len)
    step = world.runtime.step(batch, world.runtime.plan(batch, padded_to(pad_to), halves=2))
    try:
        cut = step.parts[0].num_seqs
        parts = [slice(0, cut), slice(cut, None)]
        for half, layer in order:
            run_half(world, step.parts[half], layer, requests[parts[half]], q_len[parts[half]])
    finally:
        world.runtime.end_step()
    assert page_zero_is_zero(world)
    return step


@pytest.mark.parametrize("sizes", LADDERS, ids=str)
def test_every_count_of_sequences_is_split(sizes: tuple[int, ...], provider: str, device: torch.device) -> None:
    """None, one, odd ones, a full first half, and more than the largest size, which runs in the open memory."""
    world = build(device, provider, sizes)
    requests = [world.admit() for _ in range(5)]
    for request, length in zip(requests, [5, 1, 9, 4, 3], strict=True):
        world.step([request], [length])
    for count in (5, 0, 1, 4, 2, 3, 5):
        step = split_step(world, requests[:count], [1] * count)
        first, second = step.parts
        assert (first.num_seqs, second.num_seqs) == ((count + 1) // 2, count // 2)
        assert first.token_ids.shape == second.token_ids.shape == (step.plan.shape.num_seqs // 2,)
        assert step.num_first.item() == first.num_seqs


@pytest.mark.parametrize(
    "q_len", [[3, 3, 3], [3, 3], [4], [7, 1, 1], [1, 1, 9, 2, 1], [0, 2, 0], [0, 0], [2, 1]], ids=str
)
def test_verify_extend_and_mixed_steps_are_split(q_len: list[int], provider: str, device: torch.device) -> None:
    world = build(device, provider)
    requests = [world.admit() for _ in q_len]
    world.step(requests, [3] * len(q_len))
    split_step(world, requests, q_len)
    split_step(world, requests, q_len, 6)
    split_step(world, requests, [1] * len(q_len))


@pytest.mark.parametrize("order", [((0, 0), (1, 0), (1, 1), (0, 1)), ((1, 0), (1, 1), (0, 0), (0, 1))], ids=str)
def test_the_halves_do_not_wait_for_each_other(
    order: tuple[tuple[int, int], ...], provider: str, device: torch.device
) -> None:
    """Layer by layer in turn, or the second half first: neither reads the data that the other one leaves."""
    world = build(device, provider)
    requests = world.begun(2, 6, 1, 4, 3)
    for _ in range(2):
        split_step(world, requests, [1] * 5, order=order)
        split_step(world, requests[:3], [2, 1, 3], order=order)


def test_token_ids_and_positions_go_with_their_half(provider: str, device: torch.device) -> None:
    world = build(device, provider)
    requests = world.begun(2, 5, 3)
    plain = world.batch(requests, [2, 1, 4])
    ids = np.arange(11, 18, dtype=np.int32)
    batch = type(plain)(plain.rows, plain.kv_len, plain.q_len, ids)
    step = world.runtime.step(batch, world.runtime.plan(batch, PadTo(4), halves=2))
    first, second = step.parts
    # Three tokens and four, both padded to four.
    assert [first.token_ids.tolist(), second.token_ids.tolist()] == [[11, 12, 13, 0], [14, 15, 16, 17]]
    assert [first.positions.tolist(), second.positions.tolist()] == [[2, 3, 5, 0], [3, 4, 5, 6]]
    assert [first.last_token_of_seq.tolist(), second.last_token_of_seq.tolist()] == [[1, 2], [3, 0]]
    assert [first.tokens, second.tokens] == [slice(0, 4), slice(4, 8)]
    world.runtime.end_step()


def test_calls_on_the_wrong_half_or_step_are_refused_in_one_sentence(provider: str, device: torch.device) -> None:
    world = build(device, provider)
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
    with pytest.raises(CapacityExceeded, match="pad to an even number"):
        world.runtime.plan(batch, PadTo(7), halves=2)
    split_step(world, requests, [1, 1, 1])


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


def test_recurrent_layers_of_the_halves_may_run_in_turn(provider: str, device: torch.device) -> None:
    """The second half first, layer by layer: neither half reads the places of states of the other one."""
    world = Hybrid(device, provider)
    requests = world.begun(6, 1, 3, 9)
    for q_len in ([1] * 4, [KEPT] * 4, [2, 7, 11, 1]):
        new = [world.ids(count) for count in q_len]
        batch = world.batch(requests, new)
        with world.runtime.step(batch, world.runtime.plan(batch, halves=2)) as step:
            for part in step.parts:
                rows = torch.zeros(len(part.token_ids), 2, 16, device=device)
                part.layers.store(0, rows, rows)
            outs: list[list[torch.Tensor]] = [[], []]
            for layer in range(len(world.layers)):
                for part in reversed(step.parts):
                    outs[part.half].append(world.recur(part, layer)[: part.num_tokens].clone())
        for each, ids in zip(requests, new, strict=True):
            each.ids += ids
        world.check(torch.cat([torch.cat(of_half, 1) for of_half in outs]), requests, new)
    world.runtime.check_device()


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
