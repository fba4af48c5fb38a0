"""Decode over shared prefixes: every output is the reference's, for any groups, and wrong groups are refused."""

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.mask import random_mask
from rocm_attn.batch.prefixes import PrefixGroup, SharedPrefixes
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import BadBatch, Unsupported
from rocm_attn.machine.target import known_target
from rocm_attn.problem import UNLIMITED_WINDOW, PoolKind, Problem
from rocm_attn.providers.select import select
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import Request, World, page_zero_is_zero, take_back

PROBLEMS = {
    "sinks": small_problem(has_sinks=True),
    "plain": small_problem(),
    "cap": small_problem(logits_soft_cap=1.5),
    "wide": small_problem(num_q_heads=8, num_kv_heads=1, head_dim=40, v_head_dim=24),
    "odd": small_problem(num_q_heads=3, num_kv_heads=3, head_dim=7, v_head_dim=5, dtype=torch.float16),
    "not causal": replace(small_problem(), window_right=UNLIMITED_WINDOW),
    "masks in other steps": small_problem(custom_mask=True),
}


def family(world: World, prefix_len: int, suffixes: Sequence[int]) -> list[Request]:
    """Returns a request with a prefix, and others that share it; each has its own suffix."""
    (root,) = world.begun(prefix_len)
    requests = [root, *(world.fork(root, prefix_len) for _ in suffixes[1:])]
    world.step(requests, suffixes)
    return requests


def decode(world: World, requests: Sequence[Request], groups: Sequence[PrefixGroup], pad_to: int | None = None) -> None:
    """Runs a decode step by shared prefixes and checks every layer against the reference."""
    world.step(requests, [1] * len(requests), pad_to, prefixes=SharedPrefixes(groups))


@pytest.mark.fast(interpreted=1)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_a_shared_prefix_gives_what_plain_decode_gives(problem: Problem, provider: str, device: torch.device) -> None:
    """There are two steps, so that the second step's suffixes have crossed a page."""
    world = World.build([problem, problem], device, provider)
    requests = family(world, 12, [1, 3, 5, 4])
    for _ in range(2):
        decode(world, requests, [PrefixGroup(4, 12)], pad_to=6)
    world.runtime.check_device()
    assert page_zero_is_zero(world)


def test_a_step_without_sequences_may_share_nothing(provider: str, device: torch.device) -> None:
    """An idle rank runs the same kind of step as the other ranks."""
    world = World.build([small_problem()], device, provider)
    for pad_to in (None, 4):
        decode(world, [], [], pad_to)


def test_pads_are_inert_beside_kernels_whose_pads_have_a_key(provider: str, device: torch.device) -> None:
    """Kernels of AITER need a length of 1 in padded sequences, which all layers then have."""
    world = World.build([small_problem()], device, provider)
    (selection,) = world.runtime.selections
    lengthy = {
        kind: replace(kernel, entry=replace(kernel.entry, min_kv_len=1)) if kind is StepKind.SHARED else kernel
        for kind, kernel in selection.kernels.items()
    }
    world = World.build([small_problem()], device, provider, selections=[replace(selection, kernels=lengthy)])
    decode(world, family(world, 8, [1, 2]), [PrefixGroup(2, 8)], pad_to=5)


@settings(max_examples=25)
@given(data=st.data())
@pytest.mark.parametrize("provider", ["torch"])
def test_any_groups_of_forks_of_forks_give_what_the_oracle_gives(
    provider: str, device: torch.device, data: st.DataObject
) -> None:
    """Requests share the common part of their rows' tables; a step uses any part of it, page by page."""
    world = World.build([small_problem(page_size=2, has_sinks=True)], device, provider, num_pages=200)
    requests = family(world, 10, [1, 2])
    for _ in range(3):
        parent = requests[data.draw(st.integers(0, len(requests) - 1))]
        requests.append(world.fork(parent, data.draw(st.integers(1, parent.kv_len))))
    order = data.draw(st.permutations(requests))
    groups, first, shares_too_much = [], 0, False
    while first < len(order):
        members = order[first : first + data.draw(st.integers(1, 4))]
        tables = [world.runtime.table.pages_of(request.row) for request in members]
        # Whole pages only: one that is partly filled is copied before its new token.
        most = min(request.kv_len for request in members) // 2
        common = int(np.cumprod([len({int(table[at]) for table in tables}) == 1 for at in range(most)]).sum())
        pages = data.draw(st.one_of(st.integers(0, common), st.integers(0, most)))
        shares_too_much |= pages > common
        groups.append(PrefixGroup(len(members), 2 * pages))
        first += len(members)
    if shares_too_much:
        with pytest.raises(BadBatch, match="does not share"):
            decode(world, order, groups)
    else:
        decode(world, order, groups, pad_to=data.draw(st.sampled_from([None, 8])))


def world_of(device: torch.device, *problems: Problem) -> tuple[World, list[Request]]:
    world = World.build(problems or [small_problem()], device, "torch")
    return world, family(world, 8, [1, 2])


BAD_GROUPS = {
    "half a page": ([PrefixGroup(2, 6)], "a prefix must fill whole pages"),
    "all of it": ([PrefixGroup(1, 12), PrefixGroup(1, 8)], "sequence 0 has 10 tokens and a prefix of 12"),
    "nothing after": ([PrefixGroup(1, 8), PrefixGroup(1, 11)], "sequence 1 has 11 tokens and a prefix of 11"),
    "negative": ([PrefixGroup(2, -4)], "a group has a prefix of -4 tokens"),
    "too few": ([PrefixGroup(1, 8)], "put every sequence into one group"),
    "none": ([], "groups have no sequences and the step has 2"),
    "empty": ([PrefixGroup(2, 8), PrefixGroup(0, 8)], "groups have 2, 0 sequences"),
}


@pytest.mark.parametrize(("groups", "complaint"), BAD_GROUPS.values(), ids=BAD_GROUPS)
def test_groups_that_are_none_are_refused(groups: list[PrefixGroup], complaint: str, device: torch.device) -> None:
    world, requests = world_of(device)
    batch = world.batch(requests, [1, 1])
    with pytest.raises(BadBatch, match=complaint):
        world.runtime.step(replace(batch, prefixes=SharedPrefixes(groups)))
    world.step(requests, [1, 1])


def test_more_sequences_than_a_step_has_take_no_memory(device: torch.device) -> None:
    world, requests = world_of(device)
    batch = world.batch(requests, [1, 1])
    tracemalloc.start()
    try:
        with pytest.raises(BadBatch, match=f"groups have {2**24} sequences and the step has 2"):
            replace(batch, prefixes=SharedPrefixes([PrefixGroup(2**24, 0)]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_each_group_shares_its_prefix_to_the_end(device: torch.device) -> None:
    """The second group has the longer prefix, of which its sequences share the first page alone."""
    world, (one, other) = world_of(device)
    (root,) = world.begun(4)
    apart = world.fork(root, 4)
    world.step([root, apart], [6, 6])
    groups = SharedPrefixes([PrefixGroup(2, 4), PrefixGroup(2, 8)])
    with pytest.raises(BadBatch, match="sequence 3 does not share the first 8 tokens with sequence 2"):
        world.step([one, other, root, apart], [1] * 4, prefixes=groups)


def test_rows_that_were_handed_out_again_share_nothing(device: torch.device) -> None:
    """The groups are those that were checked, and so are the rows."""
    world, requests = world_of(device)
    prefixes = SharedPrefixes([PrefixGroup(2, 8)])
    for _ in range(2):
        world.step(requests, [1, 1], prefixes=prefixes)
    world.free(requests[1])
    other = world.admit()
    assert other.row == requests[1].row
    world.step([other], [12])
    for _ in range(2):
        with pytest.raises(BadBatch, match="sequence 1 does not share"):
            world.step([requests[0], other], [1, 1], prefixes=prefixes)


def test_a_row_that_was_cut_and_has_other_pages_shares_nothing(device: torch.device) -> None:
    """Tokens that are not stored any more, by mark_stored(), are cut like those that were reserved ahead."""
    world, requests = world_of(device)
    prefixes, other = SharedPrefixes([PrefixGroup(2, 8)]), requests[1]
    world.step(requests, [1, 1], prefixes=prefixes)
    world.runtime.table.mark_stored([other.row], [4])
    world.runtime.table.truncate(other.row, 4)
    take_back(other, other.kv_len - 4)
    world.step([other], [8])
    with pytest.raises(BadBatch, match="sequence 1 does not share the first 8 tokens with sequence 0"):
        world.step(requests, [1, 1], prefixes=prefixes)


def test_steps_that_do_not_decode_are_refused(device: torch.device) -> None:
    world, requests = world_of(device)
    batch = world.batch(requests, [2, 1])
    with pytest.raises(BadBatch, match="only decode steps can share prefixes; leave them out of a step with"):
        replace(batch, prefixes=SharedPrefixes([PrefixGroup(2, 8)]))


def test_lengths_that_only_the_device_knows_are_refused_and_token_ids_are_not(device: torch.device) -> None:
    world, requests = world_of(device)
    batch = replace(world.batch(requests, [1, 1]), prefixes=SharedPrefixes([PrefixGroup(2, 8)]))
    lengths = torch.tensor([10, 11], dtype=torch.int32, device=device)
    with pytest.raises(BadBatch, match="shared prefixes need the lengths on the host"):
        replace(batch, inputs=DeviceInputs(kv_len=lengths))
    step = world.runtime.step(replace(batch, inputs=DeviceInputs(token_ids=lengths))).parts[0]
    assert step.token_ids.tolist()[:2] == [10, 11]
    assert step.plan.shape.kind is StepKind.SHARED
    world.runtime.end_step()


def test_a_mask_beside_prefixes_is_refused(device: torch.device) -> None:
    world, requests = world_of(device, small_problem(custom_mask=True))
    batch = replace(world.batch(requests, [1, 1]), prefixes=SharedPrefixes([PrefixGroup(2, 8)]))
    mask = random_mask(batch.kv_len, batch.q_len, torch.Generator(device))
    with pytest.raises(BadBatch, match="a step cannot have both a mask and shared prefixes"):
        replace(batch, mask=mask)


def test_a_step_with_shared_prefixes_is_not_split(device: torch.device) -> None:
    world, requests = world_of(device)
    batch = replace(world.batch(requests, [1, 1]), prefixes=SharedPrefixes([PrefixGroup(2, 8)]))
    with pytest.raises(BadBatch, match="a step with shared prefixes cannot be split"):
        world.runtime.step(batch, world.runtime.plan(batch, halves=2))


REFUSALS = {
    "window": (small_problem(window_left=5), r"torch.shared_prefix: it has no sliding window \(window_left 5\)"),
    "slopes": (small_problem(has_alibi_slopes=True), "torch.shared_prefix: it has no ALiBi slopes"),
    "vectorised": (
        replace(small_problem(), pool=PoolKind.VECTORIZED),
        "torch.shared_prefix: it reads K and V pages or latent pages, not vectorised pages",
    ),
}


@pytest.mark.parametrize(("problem", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_prefixes_that_no_layer_can_share_are_refused(problem: Problem, reason: str, device: torch.device) -> None:
    world, requests = world_of(device, problem)
    for _ in range(2):
        with pytest.raises(Unsupported, match=f"(?s)no layer can share prefixes; leave them out of the step.*{reason}"):
            decode(world, requests, [PrefixGroup(2, 8)])
    world.runtime.end_step()


def test_bfloat16_is_refused_where_triton_interprets_it_wrongly() -> None:
    """The results were off by 8e8, and nothing was reported."""
    problem, interpreter = replace(small_problem(page_size=16), dtype=torch.bfloat16), known_target("interpreter")
    with pytest.raises(Unsupported, match="multiplies the bits of bfloat16 as whole numbers"):
        select(problem, interpreter, "triton")
    kernels = select(problem, interpreter, "auto").kernels.values()
    assert {kernel.entry.provider for kernel in kernels} == {"cpu", "torch"}


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=6),
    st.data(),
)
def test_sequences_that_are_picked_from_groups_keep_what_they_share(
    drawn: list[tuple[int, int]], data: st.DataObject
) -> None:
    prefixes = SharedPrefixes([PrefixGroup(*group) for group in drawn])
    num_seqs = len(prefixes.prefix_len)
    order = np.array(data.draw(st.lists(st.sampled_from(range(num_seqs)), unique=True)) if num_seqs else [], np.int64)
    picked = prefixes.select(order)
    assert isinstance(picked, SharedPrefixes)
    assert picked.prefix_len.tolist() == prefixes.prefix_len[order].tolist()
    for begin, end in zip(picked.group_begin, picked.group_end, strict=True):
        assert len({int(group) for group in prefixes.group_end[order[begin:end]]}) == 1
