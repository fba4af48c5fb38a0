"""Rounds of drafts: windows, wrong parents, and what is no round. guards/test_drafts.py has others."""

from dataclasses import replace

import pytest
import torch

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.mask import StepMask
from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch, draft_batch
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadBatch, BadSetting, BadTensor, DeviceFault, Unsupported, WrongState
from rocm_attn.kernels.launch import Thunk, observe_launches
from tests.amd.worlds.drafting import DraftWorld
from tests.amd.worlds.problems import small_problem

pytestmark = pytest.mark.fast(interpreted=0)


def world_of(
    provider: str, device: torch.device, branches: int, *, window_left: int = -1, swa: bool = False
) -> DraftWorld:
    """Two layers; the second may have a window and a separate pool."""
    problem = small_problem(custom_mask=branches > 1)
    problems = [problem, replace(problem, window_left=window_left)]
    pool = 41 if swa else 0
    return DraftWorld.build(
        problems, device, provider, num_pages=65, swa_pages=pool, swa_kept=16 if swa else 0, max_kv_len=48
    )


@pytest.mark.parametrize("wrong", [-7, -1, 2, 2**31 - 1])
def test_a_parent_that_no_branch_is_is_reported(wrong: int, provider: str, device: torch.device) -> None:
    """In the second step as in the third; what pads have is not looked at."""
    world, drafts = world_of(provider, device, 2), Drafts(2, 3)
    requests = world.begun(5, 1, 8)
    for late in (1, 2, 0):
        batch = world.round_batch(requests, drafts)
        round_ = world.runtime.step(batch, world.runtime.plan(batch, PadTo(5)))
        for number in (1, 2):
            parents = torch.zeros(5, 2, dtype=torch.int32, device=world.runtime.device)
            parents[3:] = wrong
            parents[1, 0] = wrong if number == late else 1
            round_.parts[number].set_parents(parents)
        world.runtime.end_step()
        if late:
            with pytest.raises(DeviceFault, match="the parent of a new draft is not an earlier node of its tree"):
                world.runtime.check_device()
        world.runtime.check_device()


def test_a_round_without_sequences_is_legal(provider: str, device: torch.device) -> None:
    world = world_of(provider, device, 2)
    world.step_round([], Drafts(2, 3))
    world.step_round([], Drafts(2, 3), halves=True)
    world.runtime.check_device()


@pytest.mark.parametrize("branches", [1, 2])
def test_a_step_goes_on_from_a_chain_and_not_from_branches(branches: int, provider: str, device: torch.device) -> None:
    world = world_of(provider, device, branches)
    (request,) = world.begun(5)
    world.step_round([request], Drafts(branches, 3))
    assert world.runtime.table.tokens.stored_len[request.row] == (5 if branches > 1 else 8)


def test_what_is_no_round_is_refused(provider: str, device: torch.device) -> None:
    world = world_of(provider, device, 1)
    runtime, drafts = world.runtime, Drafts(1, 2)
    (request,) = world.begun(5)
    row = [request.row]
    with pytest.raises(BadBatch, match="give at least 1 of each"):
        Drafts(0, 2)
    with pytest.raises(BadSetting, match=r"steps of drafts is 1\.5; it must be a whole number"):
        Drafts(2, 1.5)  # type: ignore[arg-type]
    assert Drafts(5, 819).tokens == 4095
    with pytest.raises(BadBatch, match="8 branches with 512 steps make 4096 draft tokens"):
        Drafts(8, 512)
    with pytest.raises(BadBatch, match="sequences have 3 to 3 new tokens; with 1 branches and 2 steps"):
        StepBatch(row, [8], [3], NO_TOKEN_IDS, drafts=drafts)
    with pytest.raises(BadBatch, match="3 token ids for 1 new tokens"):
        draft_batch(row, [5], drafts, [1, 2, 3])
    mask = StepMask(torch.zeros(9, dtype=torch.uint8), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(BadBatch, match="drafts have masks of their own"):
        StepBatch(row, [7], [2], NO_TOKEN_IDS, mask=mask, drafts=drafts)
    lengths = torch.tensor([2], dtype=torch.int32, device=runtime.device)
    with pytest.raises(BadBatch, match="leave it out"):
        draft_batch(row, [5], drafts, NO_TOKEN_IDS, inputs=DeviceInputs(q_len=lengths))
    with pytest.raises(BadTensor, match="leave ahead out"):
        DeviceInputs(q_len=lengths, ahead=2)
    batch = draft_batch(row, [5], drafts, NO_TOKEN_IDS)
    with pytest.raises(BadBatch, match="build it with draft="):
        StepRunner(runtime, lambda step: step.kv_len, None).run(batch)
    with pytest.raises(BadBatch, match="row"):
        runtime.step(draft_batch(row, [20], drafts, NO_TOKEN_IDS))
    branched = draft_batch(row, [5], Drafts(2, 1), NO_TOKEN_IDS)
    runtime.table.reserve(request.row, 12)
    with pytest.raises(Unsupported, match="need masks in every layer"):
        runtime.step(branched)
    world.step([request], [1])


def test_a_draft_step_waits_for_its_parents(provider: str, device: torch.device) -> None:
    """The parents of drafts decide which keys they see, so no layer of theirs is called before."""
    world = world_of(provider, device, 2)
    (request,) = world.begun(5)
    drafts = world.runtime.step(world.round_batch([request], Drafts(2, 3))).parts
    q, k, v = world.qkv(world.problems[0], drafts[0])
    out = torch.zeros_like(q)
    with pytest.raises(WrongState, match=r"call set_parents\(\) or keep_branches\(\)"):
        drafts[1].layers.store(0, k, v)
    drafts[0].layers.store_and_attend(0, q, k, v, out)
    with pytest.raises(WrongState, match="in this order and once each"):
        drafts[2].keep_branches()
    right = torch.zeros_like(drafts[1].token_ids)
    for wrong in (right.long(), right[1:]):
        with pytest.raises(BadTensor, match=r"takes torch.int32 \[\d, 2\]"):
            drafts[1].set_parents(wrong)
    with pytest.raises(BadTensor, match="parents is a list; give a tensor"):
        drafts[1].set_parents([[0, 1]])  # type: ignore[arg-type]
    drafts[1].keep_branches()
    with pytest.raises(WrongState, match="in this order and once each"):
        drafts[1].keep_branches()
    drafts[1].layers.store_and_attend(0, q, k, v, out)
    world.runtime.end_step()
    with pytest.raises(WrongState, match="no step was begun"):
        drafts[1].layers.store(0, k, v)


@pytest.mark.fast(interpreted=1)
@pytest.mark.parametrize(
    ("branches", "window_left", "rounds"),
    [(3, 2, 1), (3, 2, 2), (1, 5, 2), *(pytest.param(3, left, 2, marks=pytest.mark.nightly) for left in (0, 5))],
)
@pytest.mark.parametrize("swa", [False, True])
def test_windows_count_back_from_the_depth_of_a_draft(
    swa: bool, rounds: int, window_left: int, branches: int, provider: str, device: torch.device
) -> None:
    """Some hold fewer drafts than a branch has; each key is looked at by itself, in prefix and branch.

    One round is a case of its own for Triton's interpreter, in which a round takes seconds.
    """
    world = world_of(provider, device, branches, window_left=window_left, swa=swa)
    requests = world.begun(9, 3)
    for _ in range(rounds):
        world.step_round(requests, Drafts(branches, 4))
        world.step(requests, [2, 1])
    world.runtime.check_device()


@pytest.mark.fast(interpreted=1)
def test_parents_build_the_ranges_of_windows_and_no_other_part_of_a_schedule(
    provider: str, device: torch.device
) -> None:
    """One layer of two has a window. How work is cut follows from lengths, which parents do not change."""
    world, drafts = world_of(provider, device, 3, window_left=2), Drafts(3, 2)
    requests = world.begun(9, 3)
    batch, launches = world.round_batch(requests, drafts), list[object]()

    def note(launch: Thunk) -> None:
        launches.append(launch)
        launch()

    with world.runtime.step(batch, world.runtime.plan(batch)) as round_, observe_launches(note):
        filled = len(launches)
        round_.parts[1].set_parents(torch.zeros(2, 3, dtype=torch.int32, device=world.runtime.device))
    trees_and_ranges = {"torch": 0, "triton": 2}
    assert len(launches) - filled == trees_and_ranges[provider]
