"""Steps with a mask: the keys that their tokens see, their positions, and the refused masks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rocm_attn.batch.mask import StepMask, TreeMask, kv_positions
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import BadBatch, BadSetting, BadTensor, Unsupported
from rocm_attn.kernels.metadata.step_tensors import NO_PARENT
from rocm_attn.machine.target import known_target
from rocm_attn.providers.select import select
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import Request, World

MASKED = small_problem(custom_mask=True)


def world_of(device: torch.device, provider: str) -> tuple[World, list[Request]]:
    """Three masked layers, one of them with a window, and a causal one; and three requests of 9, 20 and 1 tokens."""
    sinks = replace(MASKED, has_sinks=True, logits_soft_cap=2.0, has_alibi_slopes=True)
    windowed = replace(MASKED, window_left=5)
    world = World.build([MASKED, sinks, windowed, small_problem()], device, provider)
    requests = world.begun(9, 20, 1)
    return world, requests


def test_a_window_counts_the_depth_of_a_tree_and_not_its_tokens(provider: str, device: torch.device) -> None:
    """Eight siblings: each sees the window after the trunk, regardless of its place among them."""
    world = World.build([replace(MASKED, window_left=3)], device, provider)
    (trunk,) = world.begun(10)
    siblings = torch.cat([torch.ones(8, 10, dtype=torch.bool), torch.eye(8, dtype=torch.bool)], 1)
    at_the_trunk = torch.full((8,), 10, dtype=torch.int32, device=device)
    world.step([trunk], [8], visible=[siblings], positions=at_the_trunk)


def test_a_masked_step_of_single_tokens_never_has_the_plan_of_a_decode(provider: str, device: torch.device) -> None:
    """Plans are kept by the sizes of steps, and a decode's kernels look at no mask."""
    world = World.build([MASKED], device, provider, capture_sizes=(2,))
    plain = world.batch(world.begun(9, 9), [1, 1])
    bits, positions = torch.zeros(3, dtype=torch.uint8), torch.full((2,), 9, dtype=torch.int32)
    masked = replace(plain, mask=StepMask(bits.to(device), positions.to(device)))
    kinds = [world.runtime.plan(batch).shape.kind for batch in (plain, masked, plain)]
    assert kinds == [StepKind.DECODE, StepKind.MASKED, StepKind.DECODE]


def test_keys_that_no_bit_shows_may_be_nan(provider: str, device: torch.device) -> None:
    """Cached ones and new ones; the causal layer, which would see them, is left out."""
    world = World.build([MASKED], device, provider)
    (request,) = world.begun(10)
    request.k[0][3], request.v[0][4] = float("nan"), float("inf")
    pages = world.runtime.pool.layer(0)
    held = world.runtime.table.pages_of(request.row).tolist()
    pages.k[held[0], 3], pages.v[held[1], 0] = float("nan"), float("inf")
    mask = torch.ones(4, 14, dtype=torch.bool)
    mask[:, 3:5] = False
    world.step([request], [4], visible=[mask])


@pytest.mark.fast(interpreted=0)
def test_the_caller_may_change_its_mask_after_the_step_has_begun(provider: str, device: torch.device) -> None:
    world, requests = world_of(device, provider)
    batch = world.batch(requests[:1], [3])
    bits = torch.full((5,), 255, dtype=torch.uint8, device=device)
    positions = kv_positions(batch.kv_len, batch.q_len, device)
    step = world.runtime.step(replace(batch, mask=StepMask(bits, positions))).parts[0]
    bits.zero_()
    positions.zero_()
    q, k, v = world.qkv(MASKED, step)
    out = torch.full_like(q, float("nan"))
    step.layers.store_and_attend(0, q, k, v, out)
    world.remember(0, requests[:1], [3], k, v)
    world.check(0, requests[:1], [3], q, out, None, [torch.ones(3, 12, dtype=torch.bool)])
    assert step.positions.tolist()[:3] == [9, 10, 11]
    world.runtime.end_step()


def test_a_step_of_no_sequences_may_have_trees_of_numpy(device: torch.device) -> None:
    """Arrays without elements have strides of 0."""
    world, _ = world_of(device, "torch")
    parents = torch.from_numpy(np.full((0, 3), NO_PARENT, np.int32)).as_strided((0, 3), (0, 0)).to(device)
    world.runtime.step(replace(world.batch([], []), mask=TreeMask(parents)))
    world.runtime.end_step()


def ones(count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.full((count,), 255, dtype=torch.uint8, device=device)


def test_a_mask_of_another_size_than_its_step_is_refused(device: torch.device) -> None:
    world, requests = world_of(device, "torch")
    batch = world.batch(requests, [1, 2, 3])  # 10 + 44 + 12 cells
    positions = kv_positions(batch.kv_len, batch.q_len, device)
    for size in (8, 10):  # FlashInfer's bits of this step, each sequence at a new byte, take 10
        match = rf"the mask has {size} bytes; the sum of q_len \* kv_len bits over this step takes 9; give these"
        with pytest.raises(BadBatch, match=match):
            replace(batch, mask=StepMask(ones(size, device), positions))
    with pytest.raises(BadBatch, match="the mask has 5 positions for 6 new tokens"):
        replace(batch, mask=StepMask(ones(9, device), positions[:5]))
    world.runtime.step(replace(batch, mask=StepMask(ones(9, device), positions)))
    world.runtime.end_step()


def test_a_mask_beyond_what_a_launch_counts_is_refused() -> None:
    mask = StepMask(torch.empty(0, dtype=torch.uint8, device="meta"), torch.empty(0, dtype=torch.int32, device="meta"))
    with pytest.raises(BadBatch, match="takes 1075838912 bytes"):
        mask.check(np.array([2**24 - 1], np.int32), np.array([513], np.int32))
    with pytest.raises(
        BadBatch, match="16777216 keys of a sequence have cells, and at most 16777215 may; lower keys_bef"
    ):
        mask.check(np.array([2**24], np.int32), np.array([256], np.int32))


BAD_MASKS = {
    "bools": ((torch.ones(9, dtype=torch.bool), torch.zeros(6, dtype=torch.int32)), "bits of a mask is a torch.bool"),
    "a matrix": ((ones(9).view(3, 3), torch.zeros(6, dtype=torch.int32)), r"bits of a mask .* of shape \[3, 3\]"),
    "a list": (([1] * 9, torch.zeros(6, dtype=torch.int32)), "bits of a mask is a list; give a tensor"),
    "gaps": ((ones(18)[::2], torch.zeros(6, dtype=torch.int32)), r"strides \[2\]; it must be a contiguous vector"),
    "long positions": ((ones(9), torch.zeros(6, dtype=torch.int64)), "positions of a mask is a torch.int64 tensor"),
    "two devices": ((ones(9), torch.zeros(6, dtype=torch.int32, device="meta")), "bits of a mask are on cpu and its"),
}


@pytest.mark.parametrize(("tensors", "complaint"), BAD_MASKS.values(), ids=BAD_MASKS)
def test_tensors_that_are_no_mask_are_refused(tensors: tuple[torch.Tensor, torch.Tensor], complaint: str) -> None:
    with pytest.raises(BadTensor, match=complaint):
        StepMask(*tensors)


def test_parents_that_are_no_tensor_are_refused() -> None:
    with pytest.raises(BadTensor, match="parents is a list; give a tensor"):
        TreeMask([[0, 1]])  # type: ignore[arg-type]


def test_a_mask_of_parts_of_keys_is_refused() -> None:
    with pytest.raises(BadSetting, match=r"keys_before of a mask is 2\.5; it must be a whole number"):
        StepMask(ones(9), torch.zeros(6, dtype=torch.int32), keys_before=2.5)  # type: ignore[arg-type]


def test_a_mask_on_another_device_is_refused(device: torch.device) -> None:
    world, requests = world_of(device, "torch")
    mask = StepMask(ones(9, "meta"), torch.zeros(6, dtype=torch.int32, device="meta"))
    with pytest.raises(BadTensor, match="the step's mask is on meta; the runtime is on"):
        world.runtime.step(replace(world.batch(requests, [1, 2, 3]), mask=mask))


def test_a_mask_that_no_layer_looks_at_is_refused(device: torch.device) -> None:
    world = World.build([small_problem()], device, "torch")
    batch = world.batch([world.admit()], [3])
    mask = StepMask(ones(2, device), kv_positions(batch.kv_len, batch.q_len, device))
    with pytest.raises(BadBatch, match="no layer uses one; build the runtime of problems with custom_mask"):
        world.runtime.step(replace(batch, mask=mask))
    world.step(world.requests, [2])


def test_bits_of_a_mask_are_not_split(device: torch.device) -> None:
    world, requests = world_of(device, "torch")
    batch = world.batch(requests, [1, 2, 3])
    mask = StepMask(ones(9, device), kv_positions(batch.kv_len, batch.q_len, device))
    batch = replace(batch, mask=mask)
    with pytest.raises(BadBatch, match="a step with a packed mask cannot be split"):
        world.runtime.step(batch, world.runtime.plan(batch, halves=2))


def test_aiter_is_not_chosen_for_masks() -> None:
    with pytest.raises(Unsupported, match=r"no kernel of provider 'aiter' serves .*masked steps"):
        select(MASKED, known_target("gfx942"), "aiter")
