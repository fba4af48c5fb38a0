"""A verify step of trees, its accepted drafts, and later steps, which must find a plain row of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_attn.batch.mask import TreeMask
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadBatch, BadTensor, WrongState
from rocm_attn.kernels.metadata.step_tensors import NO_PARENT
from rocm_attn.kernels.speculative.arguments import Accepted, Probabilities
from rocm_attn.problem import KVEncoding, PoolKind, Problem, Scales
from rocm_attn.step.accepting import accept_drawn, accept_sampled, verified
from tests.amd.host.test_stream_order import Streams
from tests.amd.runtime.stepping import Request, World, providers, small_problem

each_provider = pytest.mark.parametrize("provider", providers())

MASKED = small_problem(custom_mask=True)
LATENT = replace(MASKED, num_kv_heads=1, v_head_dim=8, pool=PoolKind.LATENT)
EIGHT_BITS = {
    scales: replace(MASKED, kv_encoding=KVEncoding.E4M3FN, kv_scales=scales) for scales in (Scales.LAYER, Scales.TOKEN)
}
POOLS: dict[str, tuple[list[Problem], int]] = {
    "hybrid": ([MASKED, replace(MASKED, window_left=6)], 40),
    "plain": ([MASKED, small_problem()], 0),
    "eight bits, by layer": ([EIGHT_BITS[Scales.LAYER]], 0),
    "eight bits, by token": ([EIGHT_BITS[Scales.TOKEN], MASKED], 0),
    "latent": ([LATENT], 0),
}
# Node -> parent; node 0 is the last token. The ids of nodes are 100 plus their number.
TREES = [[NO_PARENT, 0, 0, 1, 2, 2, 4], [NO_PARENT, 0, 1, 2, 3, 4, 5], [NO_PARENT, 0, 0, 0, 0, 0, 3]]
# The nodes of each accepted path, and the token that the model draws after its last node, which is no draft's.
PATHS = [[0, 2, 4, 6], [0, 1], [0]]
NEXT = [7, 8, 9]


def verify(world: World, requests: list[Request]) -> Accepted:
    """Stores random K and V of all nodes in every layer, accepts the paths, moves, and records the kept tokens."""
    device = world.runtime.device
    parents = torch.tensor(TREES, dtype=torch.int32, device=device)
    batch = world.batch(requests, [7] * 3)
    ids = torch.arange(100, 107, dtype=torch.int32).repeat(3).numpy()
    batch = replace(batch, token_ids=ids, mask=TreeMask(parents))
    step = world.runtime.step(batch).parts[0]
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
    world.runtime.move_accepted(accepted)
    world.runtime.end_step()
    for request, older, path in zip(requests, olds, PATHS, strict=True):
        keep = [*range(older), *(older + node for node in path)]
        request.k, request.v = [k[keep] for k in request.k], [v[keep] for v in request.v]
    return accepted


@pytest.mark.fast(interpreted=1)
@each_provider
@pytest.mark.parametrize(("problems", "swa_pages"), POOLS.values(), ids=POOLS)
def test_steps_after_a_tree_read_the_accepted_path_as_a_plain_row(
    problems: list[Problem], swa_pages: int, provider: str, device: torch.device
) -> None:
    """Every step is compared with attention over the kept tokens, in their order."""
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
    step = world.runtime.step(batch).parts[0]
    parents = torch.tensor([[-1, 0, 0]], device=device)
    with pytest.raises(BadTensor, match=r"parents is torch.int64 of shape \[1, 3\]"):
        verified(step, parents)
    with pytest.raises(BadTensor, match="trees have up to 0 nodes"):
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


def step_with_mask(world: World, request: Request, tokens: int) -> None:
    """Runs a step of one request that may be a verify step: it has a mask, in which every token sees all."""
    world.step([request], [tokens], visible=[torch.ones(tokens, request.kv_len + tokens, dtype=torch.bool)])


def one_path(world: World, request: Request) -> Accepted:
    """Returns the path 0, 2 of a tree of three nodes, which are the last tokens of a request."""

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=world.runtime.device)

    return Accepted.empty(1, 3, world.runtime.device)._replace(
        path=ints([0, 2, -1])[None], num_accepted=ints([1]), kv_len=ints([request.kv_len - 1])
    )


def test_paths_that_a_move_would_read_past_the_end_of_are_refused(device: torch.device) -> None:
    world = World.build([MASKED], device, "torch")
    request = world.admit()
    step_with_mask(world, request, 5)
    accepted = one_path(world, request)
    counts = accepted.num_accepted
    for wrong, named in (
        (accepted._replace(kv_len=counts[:0]), r"kv_len of a move is torch.int32 of shape \[0\]"),
        (accepted._replace(kv_len=counts.long()), "kv_len of a move is torch.int64"),
        (accepted._replace(num_accepted=counts.to("meta")), "num_accepted of a move is .* on meta"),
        (accepted._replace(path=accepted.path[0]), r"path of a move .* must be .* \[3, nodes\]"),
    ):
        with pytest.raises(BadTensor, match=named):
            world.runtime.move_accepted(wrong)
    world.runtime.move_accepted(accepted)


def test_paths_are_moved_in_the_rows_of_their_step_alone(device: torch.device) -> None:
    """A caller names places in the batch, never rows: no path leads to the K and V of another request."""
    world = World.build([MASKED], device, "torch")
    request, other = world.admit(), world.admit()
    world.step([other], [9])
    step_with_mask(world, request, 5)
    accepted = one_path(world, request)
    twice = Accepted(*(tensor.repeat_interleave(2, 0) for tensor in accepted))
    for seqs, given, named in (
        ([1], accepted, "sequences of the step"),
        ([-1], accepted, "sequences of the step"),
        ([0, 0], twice, "sequences of the step"),
        ([0, 1], accepted, "1 accepted paths for 2 sequences; give one each"),
        ([0.0], accepted, "seqs holds float64; it must hold integers"),
    ):
        with pytest.raises(BadBatch, match=named):
            world.runtime.move_accepted(given, seqs)  # type: ignore[arg-type]
    world.runtime.move_accepted(accepted, [0])


def test_a_step_that_may_not_store_moves_nothing(device: torch.device) -> None:
    """Its new tokens lie in pages that another row reads too."""
    world = World.build([MASKED], device, "torch")
    request = world.admit()
    world.step([request], [7])
    child = world.fork(request, 7)
    rows = torch.tensor([child.row], dtype=torch.int32).numpy()
    before = world.runtime.pool.layer(0).k.clone()
    mask = TreeMask(torch.tensor([[NO_PARENT, 0, 0]], dtype=torch.int32, device=device))
    step = world.runtime.step(StepBatch(rows, [7], [3], mask=mask)).parts[0]
    q = world.random(step.token_ids.shape[0], 6, 16)
    step.layers.attend(0, q, torch.empty_like(q))
    for _ in range(2):
        with pytest.raises(BadBatch, match=f"would store token 4 of row {child.row} in a page that another row"):
            world.runtime.move_accepted(one_path(world, child))
        world.runtime.end_step()
    assert torch.equal(before.nan_to_num(), world.runtime.pool.layer(0).k.nan_to_num())


def test_what_is_forked_after_its_step_is_not_moved(device: torch.device) -> None:
    """The move would write to pages that the fork reads."""
    world = World.build([MASKED], device, "torch")
    request, runtime = world.admit(), world.runtime
    step_with_mask(world, request, 8)
    accepted = one_path(world, request)
    child = runtime.table.fork(request.row, 6)
    before = runtime.pool.layer(0).k.clone()
    with pytest.raises(WrongState, match=f"row {request.row} was freed, cut, forked or kept since"):
        runtime.move_accepted(accepted)
    assert torch.equal(before.nan_to_num(), runtime.pool.layer(0).k.nan_to_num())
    runtime.table.free(child)


def test_a_move_on_another_stream_comes_between_its_step_and_the_next_one() -> None:
    world = World.build([MASKED], torch.device("cpu"), "torch")
    streams = world.runtime.gate._streams._streams = Streams()
    request = world.admit()
    step_with_mask(world, request, 5)
    streams.now = 7
    accepted = one_path(world, request)
    world.runtime.move_accepted(accepted._replace(num_accepted=torch.zeros_like(accepted.num_accepted)))
    assert streams.take_log() == ["7 waits for 0"]
    streams.now = 0
    world.step([request], [1])
    assert streams.take_log() == ["0 waits for 7"]


def test_what_was_accepted_is_moved_once_and_while_its_rows_are_its_own(device: torch.device) -> None:
    world = World.build([MASKED], device, "torch")
    request, runtime = world.admit(), world.runtime
    step_with_mask(world, request, 8)
    runtime.move_accepted(one_path(world, request))
    with pytest.raises(WrongState, match="they were moved already"):
        runtime.move_accepted(one_path(world, request))
    request = world.admit()
    step_with_mask(world, request, 3)
    runtime.table.free(request.row)
    with pytest.raises(WrongState, match=f"row {request.row} was freed, cut, forked or kept since"):
        runtime.move_accepted(one_path(world, request))


def test_what_was_accepted_is_not_moved_after_the_row_has_another_request(device: torch.device) -> None:
    """The last step is the other request's prompt by then, whose tokens must not move."""
    world = World.build([MASKED], device, "torch")
    request = world.admit()
    world.step([request], [5])
    step_with_mask(world, request, 5)
    stale = one_path(world, request)
    world.free(request)
    other = world.admit()
    assert other.row == request.row
    world.step([other], [11])
    with pytest.raises(WrongState, match="the last step has stored no trees of drafts"):
        world.runtime.move_accepted(stale)
    world.step([other], [1])


def test_rows_that_go_or_are_kept_meanwhile_leave_the_moves_of_others_alone(device: torch.device) -> None:
    """An engine does this: a prefix cache keeps known pages, and one of the step's requests has ended by its text."""
    world = World.build([MASKED], device, "torch")
    requests = [world.admit() for _ in range(2)]
    world.step(requests, [4, 4])
    world.step(requests, [3, 3], visible=[torch.ones(3, 7, dtype=torch.bool)] * 2)
    stays, goes = requests
    accepted = one_path(world, stays)
    world.runtime.table.kept.keep(stays.row, 0, 1)
    world.free(goes)
    with pytest.raises(WrongState, match=f"row {goes.row} was freed, cut, forked or kept since"):
        world.runtime.move_accepted(Accepted(*(tensor.repeat_interleave(2, 0) for tensor in accepted)))
    world.runtime.move_accepted(accepted, [0])
    world.runtime.table.truncate(stays.row, 6)
    path = [0, 1, 2, 3, 4, 6]
    stays.k, stays.v = [k[path] for k in stays.k], [v[path] for v in stays.v]
    world.step([stays], [2])
