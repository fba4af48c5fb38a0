"""Decode over shared prefixes: equal to the oracle and to plain decode, and refused where it would not be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from rocm_attn.errors import BadBatch, Unsupported, WrongState
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.shared_prefix import PrefixGroup
from rocm_attn.step_inputs import DeviceInputs
from tests.amd.runtime.stepping import Request, World, providers, small_problem

each_provider = pytest.mark.parametrize("provider", providers())

PROBLEMS = {
    "plain": small_problem(),
    "sinks": small_problem(has_sinks=True),
    "cap": small_problem(logits_soft_cap=1.5),
    "wide": small_problem(num_q_heads=8, num_kv_heads=1, head_dim=40, v_head_dim=24),
    "not causal": replace(small_problem(), causal=False),
}


def family(world: World, prefix_len: int, suffixes: Sequence[int]) -> list[Request]:
    """A request with a prefix, and others that share it; each has a suffix of its own."""
    root = world.admit()
    world.step([root], [prefix_len])
    requests = [root, *(world.fork(root, prefix_len) for _ in suffixes[1:])]
    world.step(requests, suffixes)
    return requests


def decode(world: World, requests: Sequence[Request], groups: Sequence[PrefixGroup], pad_to: int | None = None) -> None:
    """A decode step by shared prefixes, every layer against the oracle, and against plain decode."""
    new = [1] * len(requests)
    batch = world.batch(requests, new)
    step = world.runtime.begin_step(batch, pad_to)
    shared = world.runtime.share_prefix(batch, groups)
    for layer, problem in enumerate(world.problems):
        q, k, v = world.qkv(problem, step)
        world.remember(layer, requests, new, k, v)
        world.runtime.store(layer, k, v)
        out = torch.full_like(q[..., : problem.v_head_dim], float("nan"))
        lse = shared.attend(layer, q, out)
        world.check(layer, requests, new, q, out, lse)
        plain = torch.full_like(out, float("nan"))
        world.runtime.attend(layer, q, plain)
        torch.testing.assert_close(out, plain, atol=1e-5, rtol=1e-5)
    world.runtime.end_step()


@each_provider
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_a_shared_prefix_gives_what_plain_decode_gives(problem: Problem, provider: str, device: torch.device) -> None:
    """Twice, so that the second step's suffixes have crossed a page."""
    world = World.build([problem, problem], device, provider)
    requests = family(world, 12, [1, 3, 5, 4])
    for _ in range(2):
        decode(world, requests, [PrefixGroup(4, 12)], pad_to=6)
    world.runtime.check_device()


@each_provider
def test_groups_have_prefixes_of_their_own(provider: str, device: torch.device) -> None:
    """Two families, a request alone, and one whose group shares less than it could."""
    world = World.build([small_problem(has_sinks=True)], device, provider, num_pages=128)
    first, second = family(world, 8, [1, 2, 7]), family(world, 20, [2, 1])
    alone = world.admit()
    world.step([alone], [5])
    groups = [PrefixGroup(3, 8), PrefixGroup(1, 0), PrefixGroup(2, 16)]
    decode(world, [*first, alone, *second], groups)


@each_provider
def test_sequences_may_be_nothing_but_the_prefix_and_a_token(provider: str, device: torch.device) -> None:
    world = World.build([small_problem()], device, provider)
    root = world.admit()
    world.step([root], [16])
    requests = [root, world.fork(root, 16)]
    decode(world, requests, [PrefixGroup(2, 16)])


def world_of(device: torch.device, *problems: Problem) -> tuple[World, list[Request]]:
    world = World.build(problems or [small_problem()], device, "torch")
    return world, family(world, 8, [1, 2])


BAD_GROUPS = {
    "half a page": ([PrefixGroup(2, 6)], "a prefix of 6 tokens in pages of 4, with 10 tokens in the shortest"),
    "all of it": ([PrefixGroup(1, 12), PrefixGroup(1, 8)], "a prefix of 12 tokens in pages of 4, with 10 tokens"),
    "negative": ([PrefixGroup(2, -4)], "a prefix of -4 tokens"),
    "too few": ([PrefixGroup(1, 8)], "groups of 1 sequences for 2; every sequence is in one group"),
    "empty": ([PrefixGroup(2, 8), PrefixGroup(0, 8)], "groups of 2, 0 sequences for 2"),
}


@pytest.mark.parametrize(("groups", "complaint"), BAD_GROUPS.values(), ids=BAD_GROUPS)
def test_groups_that_are_none_are_refused(groups: list[PrefixGroup], complaint: str, device: torch.device) -> None:
    world, requests = world_of(device)
    batch = world.batch(requests, [1, 1])
    world.runtime.begin_step(batch)
    with pytest.raises(BadBatch, match=complaint):
        world.runtime.share_prefix(batch, groups)
    world.runtime.end_step()


def test_sequences_with_pages_of_their_own_are_refused(device: torch.device) -> None:
    """Equal tokens are not enough: the pages must be the same."""
    world, requests = world_of(device)
    stranger = world.admit()
    world.step([stranger], [10])
    batch = world.batch([*requests, stranger], [1, 1, 1])
    world.runtime.begin_step(batch)
    with pytest.raises(BadBatch, match="sequence 2 does not share the 8 tokens of sequence 0; fork its row"):
        world.runtime.share_prefix(batch, [PrefixGroup(3, 8)])
    world.runtime.end_step()


def test_steps_that_do_not_decode_are_refused(device: torch.device) -> None:
    world, requests = world_of(device)
    batch = world.batch(requests, [2, 1])
    world.runtime.begin_step(batch)
    with pytest.raises(BadBatch, match="prefixes are shared in decode steps with sequences; this is a mixed step"):
        world.runtime.share_prefix(batch, [PrefixGroup(2, 8)])
    world.runtime.end_step()


def test_lengths_that_only_the_device_knows_are_refused(device: torch.device) -> None:
    world, requests = world_of(device)
    batch = world.batch(requests, [1, 1])
    lengths = torch.tensor([10, 11], dtype=torch.int32, device=device)
    batch = replace(batch, inputs=DeviceInputs(kv_len=lengths))
    world.runtime.begin_step(batch)
    with pytest.raises(BadBatch, match="prefixes are shared where the host knows the lengths"):
        world.runtime.share_prefix(batch, [PrefixGroup(2, 8)])
    world.runtime.end_step()


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (small_problem(window_left=5), r"a window \(window_left 5\) is counted from each query"),
        (small_problem(has_alibi_slopes=True), "ALiBi slopes weigh distances"),
        (replace(small_problem(), pool=PoolKind.VECTORIZED), "vectorised pages are not read in two parts"),
    ],
)
def test_layers_that_cannot_share_prefixes_are_refused(problem: Problem, reason: str, device: torch.device) -> None:
    world, requests = world_of(device, problem)
    batch = world.batch(requests, [1, 1])
    world.runtime.begin_step(batch)
    with pytest.raises(Unsupported, match=reason):
        world.runtime.share_prefix(batch, [PrefixGroup(2, 8)])
    world.runtime.end_step()


def test_a_shared_prefix_ends_with_its_step(device: torch.device) -> None:
    world, requests = world_of(device)
    batch = world.batch(requests, [1, 1])
    with pytest.raises(WrongState):
        world.runtime.share_prefix(batch, [PrefixGroup(2, 8)])
    step = world.runtime.begin_step(batch)
    shared = world.runtime.share_prefix(batch, [PrefixGroup(2, 8)])
    world.runtime.end_step()
    q, _, _ = world.qkv(small_problem(), step)
    for begin in (lambda: None, lambda: world.runtime.begin_step(world.batch(requests, [1, 1]))):
        begin()
        with pytest.raises(WrongState, match="the step whose prefixes were shared is over"):
            shared.attend(0, q, torch.empty_like(q))
    world.runtime.end_step()
