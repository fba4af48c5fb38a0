"""Whole steps against the reference: rows at any stride, forgotten token ids, and what no plan serves."""

import pytest
import torch

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import BadBatch, CapacityExceeded, NeverFits, WrongState
from tests.amd.graphs.small_models import Tiny
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import World


def test_strided_rows_are_served(provider: str, device: torch.device) -> None:
    """q, k and v cut out of one fused projection, as models make them."""
    world = World.build([small_problem()], device, provider)
    requests = [world.admit(), world.admit()]
    for q_len in ([4, 6], [1, 1]):
        step = world.runtime.step(world.batch(requests, q_len)).parts[0]
        rows = world.random(step.token_ids.shape[0], 10 * 16)
        q, k, v = torch.split(rows.view(-1, 10, 16), [6, 2, 2], dim=1)
        world.remember(0, requests, q_len, k[: step.num_tokens], v[: step.num_tokens])
        out = world.random(rows.shape[0], 6, 32)[..., :16]
        lse = torch.empty(rows.shape[0], 6, device=device)
        step.layers.store_and_attend(0, q, k, v, out, lse)
        world.check(0, requests, q_len, q, out, lse)
        world.runtime.end_step()


def test_rows_of_one_element_may_have_any_stride(provider: str, device: torch.device) -> None:
    world = World.build([small_problem(head_dim=1, v_head_dim=1)], device, provider)
    requests = [world.admit(), world.admit()]
    for q_len in ([4, 6], [1, 1]):
        step = world.runtime.step(world.batch(requests, q_len)).parts[0]
        tokens = step.token_ids.shape[0]
        q, k, v, out = (world.random(tokens, 1, heads).transpose(1, 2) for heads in (6, 2, 2, 6))
        world.remember(0, requests, q_len, k[: step.num_tokens], v[: step.num_tokens])
        lse = torch.empty(tokens, 6, device=device)
        step.layers.store_and_attend(0, q, k, v, out, lse)
        world.check(0, requests, q_len, q, out, lse)
        world.runtime.end_step()


@pytest.mark.parametrize(
    "shape",
    [
        PaddedShape(StepKind.MIXED, 1, 0),
        PaddedShape(StepKind.MIXED, 0, 4),
        PaddedShape(StepKind.DECODE, 4, 8),
        PaddedShape(StepKind.MIXED, 3, 6, 2),
        PaddedShape(StepKind.MIXED, 4, 7, 2),
        PaddedShape(StepKind.DECODE, 3, 3, 3),
        PaddedShape(StepKind.VERIFY, 2, 4, 2),
        PaddedShape(StepKind.DECODE, 2, 6, 3, Drafts(1, 2)),
    ],
)
def test_a_shape_whose_parts_have_no_size_is_refused(shape: PaddedShape, device: torch.device) -> None:
    world = World.build([small_problem()], device, "torch")
    requests = world.begun(5)
    with pytest.raises(NeverFits, match=r"no step runs at PaddedShape.*; use a shape that runtime.padding returns"):
        world.runtime.plan(world.batch([], []), shape)
    world.step(requests, [1])


@pytest.mark.fast(interpreted=0)
def test_a_plan_serves_no_batch_that_is_larger_than_it_was_made_for(provider: str, device: torch.device) -> None:
    """Kernels that bake a length would lose the last keys."""
    world = World.build([small_problem()], device, provider, num_pages=128, max_kv_len=200, capture_sizes=(1, 2, 4))
    (request,) = world.begun(5)
    runtime, batch = world.runtime, world.batch([request], [1])
    plan = runtime.plan(batch)
    with runtime.step(batch, plan) as step:
        assert step.plan is plan
    world.step([request], [145])
    longer = world.batch([request], [1])
    if plan.bounds.max_kv_len < 151:
        with pytest.raises(CapacityExceeded, match="its plan allows 1 and 64"):
            runtime.stage(longer, plan)
    with pytest.raises(CapacityExceeded, match="1 sequences with 2 new tokens do not fit"):
        runtime.stage(world.batch([request], [2]), plan)
    runtime.seals.seal()
    runtime.seals.unseal((1, 2))
    with pytest.raises(WrongState, match="the plan was made before the sealed addresses were released"):
        runtime.stage(batch, plan)
    world.step([request], [1])


@pytest.mark.fast(interpreted=0)
@pytest.mark.parametrize("eagerly", [False, True])
def test_forgotten_token_ids_are_refused_and_never_run_as_zeros(
    provider: str, device: torch.device, eagerly: bool
) -> None:
    tiny = Tiny.build(device, provider, [4, 8])
    runner = tiny.runner(graphs=False)
    run = runner.run_eagerly if eagerly else runner.run
    row = tiny.runtime.table.admit()
    tiny.runtime.table.reserve(row, 3)
    with pytest.raises(BadBatch, match="3 new tokens and no token ids; pass token_ids, or NO_TOKEN_IDS"):
        run(StepBatch([row], [3], [3]))
    on_device = DeviceInputs(token_ids=torch.tensor([5, 7, 9], dtype=torch.int32, device=device))
    from_device = run(StepBatch([row], [3], [3], inputs=on_device)).clone()
    assert torch.equal(from_device, run(StepBatch([row], [3], [3], [5, 7, 9])))
    assert run(StepBatch([row], [3], [3], NO_TOKEN_IDS)).isfinite().all()
    assert len(run(StepBatch([], [], []))) == 0
