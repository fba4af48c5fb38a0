"""A verify step of trees, what is accepted of them, and steps after it, which must find a plain row of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_attn.batch.mask import TreeMask
from rocm_attn.errors import BadTensor
from rocm_attn.kernels.metadata.step_tensors import NO_PARENT
from rocm_attn.kernels.speculative.arguments import Accepted, Probabilities
from rocm_attn.problem import KVEncoding, PoolKind, Problem, Scales
from rocm_attn.step.accepting import accept_drawn, accept_sampled, verified
from tests.amd.runtime.stepping import Request, World, providers, small_problem

each_provider = pytest.mark.parametrize("provider", providers())

MASKED = small_problem(custom_mask=True)
LATENT = replace(MASKED, num_kv_heads=1, v_head_dim=8, pool=PoolKind.LATENT)
EIGHT_BITS = {
    scales: replace(MASKED, kv_encoding=KVEncoding.E4M3FN, kv_scales=scales) for scales in (Scales.LAYER, Scales.TOKEN)
}
POOLS: dict[str, tuple[list[Problem], int]] = {
    "plain": ([MASKED, small_problem()], 0),
    "hybrid": ([MASKED, replace(MASKED, window_left=6)], 40),
    "eight bits, by layer": ([EIGHT_BITS[Scales.LAYER]], 0),
    "eight bits, by token": ([EIGHT_BITS[Scales.TOKEN], MASKED], 0),
    "latent": ([LATENT], 0),
}
# Node -> parent; node 0 is the last token. The ids of nodes are 100 plus their number.
TREES = [[NO_PARENT, 0, 0, 1, 2, 2, 4], [NO_PARENT, 0, 1, 2, 3, 4, 5], [NO_PARENT, 0, 0, 0, 0, 0, 3]]
# What the model draws after each node of a path; its last entry is no draft's.
PATHS = [[0, 2, 4, 6], [0, 1], [0]]
NEXT = [7, 8, 9]


def verify(world: World, requests: list[Request]) -> Accepted:
    """Store random K and V of all nodes in every layer, accept the paths, move, and note what is kept."""
    device = world.runtime.device
    parents = torch.tensor(TREES, dtype=torch.int32, device=device)
    batch = world.batch(requests, [7] * 3)
    ids = torch.arange(100, 107, dtype=torch.int32).repeat(3).numpy()
    batch = replace(batch, token_ids=ids, mask=TreeMask(parents))
    step = world.runtime.begin_step(batch)
    drawn = torch.full_like(step.token_ids, -5)
    for seq, (path, last) in enumerate(zip(PATHS, NEXT, strict=True)):
        for node, after in zip(path, [*(100 + node for node in path[1:]), last], strict=True):
            drawn[7 * seq + node] = after
    olds = [request.kv_len for request in requests]
    for layer, problem in enumerate(world.problems):
        q, k, v = world.qkv(problem, step)
        world.remember(layer, requests, [7] * 3, k, v)
        step.layers.store_and_attend(layer, q, k, v, torch.empty_like(q[..., : problem.v_head_dim]))
    accepted = accept_drawn(drawn, verified(step, parents))
    world.runtime.move_accepted(accepted, step.row_of_seq)
    world.runtime.end_step()
    for request, older, path in zip(requests, olds, PATHS, strict=True):
        keep = [*range(older), *(older + node for node in path)]
        request.k, request.v = [k[keep] for k in request.k], [v[keep] for v in request.v]
    return accepted


@each_provider
@pytest.mark.parametrize(
    ("problems", "swa_pages"),
    [
        pytest.param(*pool, id=name, marks=[pytest.mark.long] * (name == "eight bits, by layer"))
        for name, pool in POOLS.items()
    ],
)
def test_steps_after_a_tree_read_the_accepted_path_as_a_plain_row(
    problems: list[Problem], swa_pages: int, provider: str, device: torch.device
) -> None:
    """Every step is compared with attention over the tokens that were kept, in their order."""
    world = World.build(problems, device, provider, num_pages=80, swa_pages=swa_pages, swa_kept=8 if swa_pages else 0)
    requests = [world.admit() for _ in range(3)]
    world.step(requests, [9, 14, 1])
    older = [request.kv_len for request in requests]
    accepted = verify(world, requests)
    assert accepted.num_accepted[:3].tolist() == [len(path) - 1 for path in PATHS]
    assert accepted.next_token[:3].tolist() == NEXT
    assert accepted.kv_len[:3].tolist() == [a + len(path) for a, path in zip(older, PATHS, strict=True)]
    world.step(requests, [1, 1, 1])
    verify(world, requests)
    world.step(requests, [2, 3, 1])
    world.runtime.check_device()
    assert world.page_zero_is_zero()


@each_provider
def test_what_cannot_be_accepted_is_refused(provider: str, device: torch.device) -> None:
    world = World.build([MASKED], device, provider)
    requests = [world.admit()]
    batch = replace(world.batch(requests, [3]), mask=TreeMask(torch.tensor([[-1, 0, 0]]).int().to(device)))
    step = world.runtime.begin_step(batch)
    parents = torch.tensor([[-1, 0, 0]], device=device)
    with pytest.raises(BadTensor, match=r"parents is torch.int64 of shape \[1, 3\]"):
        verified(step, parents)
    with pytest.raises(BadTensor, match="trees have up to 0 nodes; at least 1 and at most 4096 serve"):
        verified(step, parents.int()[:, :0])
    with pytest.raises(BadTensor, match="parents is on meta and the step on"):
        verified(step, parents.int().to("meta"))
    given = verified(step, parents.int())
    with pytest.raises(BadTensor, match=r"drawn is torch.int64 .* it must be torch.int32 \[\d+\], contiguous"):
        accept_drawn(torch.zeros(len(step.token_ids), dtype=torch.int64, device=device), given)
    rows = torch.zeros(len(step.token_ids), 9, device=device)
    uniform = torch.zeros(len(step.token_ids), device=device)
    with pytest.raises(
        BadTensor, match=r"draft is torch.float32 of shape \[\d+, 8\]; it must be torch.float32 \[\d+, 9"
    ):
        accept_sampled(Probabilities(rows, rows[:, :8], uniform, uniform), given)
    world.runtime.end_step()
