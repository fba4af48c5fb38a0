"""States of recurrent layers: the mechanisms by which engines have corrupted them, with the safeguard and without.

Each case is a public thread, and does with this runtime what went wrong there. With the safeguard the runtime refuses
it on the host, or the device reports it and leaves every state as it is; without it the text goes on, and is wrong.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.errors import BadBatch, DeviceFault, WrongState
from rocm_attn.guards.registry import Guards
from tests.amd.guards.ways import both_ways
from tests.amd.worlds.hybrid import GATED_DELTA, KEPT, PAGE_SIZE, Hybrid, Told
from tests.amd.worlds.world import ALL_ON

# A request that goes on, and its next tokens, as an engine has them on the device.
Case = Callable[[Hybrid], tuple[Told, int]]


def go_on(world: Hybrid, requests: Sequence[Told], kv_len: Sequence[int]) -> torch.Tensor:
    """Runs a step of one token for each request, with lengths that only the device knows."""
    new = [world.ids(1) for _ in requests]
    batch = world.batch(requests, new)
    lengths = torch.tensor(kv_len, dtype=torch.int32, device=world.runtime.device)
    out = world.runner.run(replace(batch, inputs=DeviceInputs(kv_len=lengths, ahead=0))).tensor
    for each, ids, tokens in zip(requests, new, kv_len, strict=True):
        each.ids = each.ids[: tokens - 1] + ids
    return out


def rejected_drafts(world: Hybrid) -> tuple[Told, int]:
    """vllm#39273, rMLX#436: drafts were folded, and the sequence goes back further than the last step's."""
    one = world.admit()
    world.run([one], [world.ids(2 * KEPT)])
    world.run([one], [world.ids(1)])
    return one, 2 * KEPT - 1


def counts_of_another_row(world: Hybrid) -> tuple[Told, int]:
    """vllm#53919: accepted counts reach the row next to theirs, so that it goes on after tokens that it does not have.

    A count is no input here, and the length that follows from it is compared with the state.
    """
    one = world.admit()
    world.run([one], [world.ids(KEPT + 4)])
    return one, KEPT + 2


def uninitialised(world: Hybrid) -> tuple[Told, int]:
    """imp#1503, LMCache#4247: the pages of a row are filled from elsewhere, and its slot holds what was there."""
    one = world.admit()
    one.ids = world.ids(6)
    world.runtime.table.reserve(one.row, 7)
    world.runtime.table.mark_stored([one.row], [6])
    return one, 7


def of_the_request_before(world: Hybrid) -> tuple[Told, int]:
    """ATOM#1759, vllm#53505: a slot is given to another request, which finds a state of as many tokens there."""
    before = world.admit()
    world.run([before], [world.ids(6)])
    world.runtime.table.free(before.row)
    return uninitialised(world)


def of_tokens_taken_back(world: Hybrid) -> tuple[Told, int]:
    """A row goes back, and its pages are filled from elsewhere: its state is that of as many other tokens."""
    one = world.admit()
    world.run([one], [world.ids(6)])
    world.back(one, 0)
    one.ids = world.ids(6)
    world.runtime.table.reserve(one.row, 7)
    world.runtime.table.mark_stored([one.row], [6])
    return one, 7


def in_wrong_units(world: Hybrid) -> tuple[Told, int]:
    """vllm#55600, vllm#53142: a checkpoint is looked up in blocks of another size, and is that of fewer tokens."""
    kept, one = world.runtime.table.kept, world.admit()
    world.run([one], [world.ids(PAGE_SIZE)])
    ids = kept.keep(one.row, 0, 1)
    late = Told(kept.admit_over(ids, PAGE_SIZE), list(one.ids) + world.ids(PAGE_SIZE))
    world.runtime.table.reserve(late.row, 2 * PAGE_SIZE + 1)
    world.runtime.table.mark_stored([late.row], [2 * PAGE_SIZE])
    return late, 2 * PAGE_SIZE + 1


CASES = [
    rejected_drafts,
    counts_of_another_row,
    uninitialised,
    of_the_request_before,
    of_tokens_taken_back,
    in_wrong_units,
]


@both_ways
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_state_that_is_not_the_one_before_the_step_is_refused(case: Case, graphs: bool, device: torch.device) -> None:
    def outputs(guards: Guards) -> tuple[Hybrid, torch.Tensor, list[Told]]:
        world = Hybrid(device, "torch", graphs=graphs, guards=guards, layers=(GATED_DELTA,))
        world.runtime.states.memory[2:].fill_(0x3C)  # numbers, as memory that was used before has
        good = world.admit()
        world.run([good], [world.ids(5)])
        one, kv_len = case(world)
        return world, go_on(world, [good, one], [6, kv_len]), [good, one]

    world, out, (good, one) = outputs(ALL_ON)
    assert not out[1].any()
    world.check(out[:1], [good], [good.ids[-1:]])
    with pytest.raises(DeviceFault, match="the state of a row is not the one before the new tokens") as fault:
        world.runtime.check_device()
    assert set(fault.value.rows) == {good.row, one.row}
    world.step([good], [world.ids(1)])

    world, out, (good, one) = outputs(Guards().without("state_lineage"))
    world.runtime.check_device()  # nothing is reported
    world.check(out[:1], [good], [good.ids[-1:]])
    assert not world.is_right(out[1:], [one], [one.ids[-1:]])


def test_a_prefix_without_its_state_is_not_handed_out(device: torch.device) -> None:
    """atlas#743: pages are found in the cache, and the checkpoint that belongs to them is empty."""
    world = Hybrid(device, "torch", checkpoints=1)
    kept, one = world.runtime.table.kept, world.admit()
    world.run([one], [world.ids(PAGE_SIZE)])
    first = kept.keep(one.row, 0, 1)
    world.run([one], [world.ids(PAGE_SIZE)])
    second = kept.keep(one.row, 1, 2)  # no checkpoint is free
    with pytest.raises(BadBatch, match="recurrent layers have no state after 8 kept tokens; begin after 4 tokens"):
        kept.admit_over([*first, *second], 2 * PAGE_SIZE)
    kept.drop(first)
    with pytest.raises(WrongState):
        kept.admit_over(first, PAGE_SIZE)
    assert kept.have_states(kept.keep(one.row, 1, 2)).all()
    assert kept.num_free_states == 0
    kept.drop_all()
    assert kept.num_free_states == 1


def test_a_state_within_a_page_is_not_kept_with_it(device: torch.device) -> None:
    """vllm#43559: a chunk ends within a block, and its state is handed out as that of the whole block."""
    world = Hybrid(device, "torch")
    kept, one = world.runtime.table.kept, world.admit()
    world.run([one], [world.ids(2 * PAGE_SIZE - 1)])
    assert not kept.have_states(kept.keep(one.row, 0, 1)).any()
    world.run([one], [world.ids(KEPT + 1)])  # past the border by a step that keeps no token
    assert not kept.have_states(kept.keep(one.row, 1, 2)).any()


def test_a_checkpoint_holds_no_draft(device: torch.device) -> None:
    """vllm#53912: the state in the cache has rejected drafts in it; sglang#34043: its convolution has zeros."""
    world = Hybrid(device, "torch")
    kept, one = world.runtime.table.kept, world.admit()
    world.run([one], [world.ids(PAGE_SIZE - 1)])
    world.run([one], [world.ids(KEPT)])  # one token and two drafts
    world.back(one, PAGE_SIZE)
    ids = kept.keep(one.row, 0, 1)
    prefix = list(one.ids)
    world.step([one], [world.ids(2)])
    late = Told(kept.admit_over(ids, PAGE_SIZE), prefix)
    world.step([late, one], [world.ids(1), world.ids(1)])


@pytest.mark.parametrize("kv_len", [1, 3])
def test_a_copy_of_a_state_that_is_gone_is_none(kv_len: int, device: torch.device) -> None:
    """vllm#53505: a running state is copied back after other tokens. The copy is refused when a step needs it."""
    world = Hybrid(device, "torch")
    one = world.admit()
    world.run([one], [world.ids(6)])
    child = Told(world.runtime.table.fork(one.row, kv_len), one.ids[:kv_len])
    with pytest.raises(BadBatch, match=f"goes on after {kv_len} tokens of row 2, whose state is there for no token"):
        world.run([child], [world.ids(1)])
    go_on(world, [child], [kv_len + 1])
    with pytest.raises(DeviceFault, match="the state of a row"):
        world.runtime.check_device()
    world.step([one], [world.ids(1)])


def test_a_row_that_begins_again_has_no_state_of_its_earlier_tokens(device: torch.device) -> None:
    world = Hybrid(device, "torch")
    one = world.admit()
    world.run([one], [world.ids(3)])
    world.run([one], [world.ids(1)])
    world.back(one, 0)
    world.run([one], [world.ids(6)])
    world.back(one, 4)
    with pytest.raises(BadBatch, match="goes on after 4 tokens of row 1, whose state is there after 6 tokens"):
        world.run([one], [world.ids(1)])


def test_a_step_that_has_not_its_state_leaves_graphs_on(device: torch.device) -> None:
    """No row was free for others, so a graph was tried on that step, and its fault switched all graphs off."""
    world = Hybrid(device, "torch", graphs=True, num_rows=4)
    requests = world.begun(6, 6, 6, 6)
    new = [world.ids(1) for _ in requests]
    batch = world.batch(requests, new)
    lengths = torch.tensor(batch.kv_len, device=device)
    with world.runtime.step(replace(batch, inputs=DeviceInputs(kv_len=lengths))) as step:  # the host loses track
        world.forward(step.parts[0])
    for each, ids in zip(requests, new, strict=True):
        each.ids += ids
    gone, *others = requests
    world.back(gone, 2)
    out = world.run(requests, [world.ids(1) for _ in requests])
    assert not out[0].any()
    with pytest.raises(DeviceFault, match="the state of a row"):
        world.runtime.check_device()
    world.step(others, [world.ids(1) for _ in others])
    assert world.runner.counters.graphs_off == ""
    assert world.runner.counters.replays
