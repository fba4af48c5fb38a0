"""Data that rows share stays unchanged, and data that no step has stored is not read."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.prefixes import PrefixGroup, SharedPrefixes
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.errors import BadBatch, WrongState
from rocm_attn.guards.registry import GUARDS, Guards
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.paging.kept_pages import KeptIds
from rocm_attn.providers.launches import StepOps
from tests.amd.guards.test_poisoned_memory import fill_with_nan
from tests.amd.guards.ways import both_ways, in_each_way
from tests.amd.worlds.world import ALL_ON, Request, World, is_right, take_back


def begin_over(serving: World, kept: Request, ids: KeptIds, kv_len: int) -> Request:
    """Returns a request over kept pages with the first tokens of another one."""
    request = kept.first(serving.runtime.table.kept.admit_over(ids, kv_len), kv_len)
    serving.requests.append(request)
    return request


@in_each_way
def test_a_row_that_goes_back_leaves_its_forks_alone(provider: str, graphs: bool, device: torch.device) -> None:
    def parent_and_child(guards: Guards) -> tuple[World, Request, Request]:
        """Parent and child share ten tokens in two and a half pages, of which the parent removes five."""
        serving = World.one_layer(device, guards, graphs=graphs, provider=provider)
        (parent,) = serving.begun(9)
        serving.step([parent], [1])
        child = serving.fork(parent, 10)
        take_back(parent, 5)
        return serving, parent, child

    serving, parent, child = parent_and_child(ALL_ON)
    message = "would store token 5 of row 1"
    with pytest.raises(BadBatch, match=message):
        serving.run([parent], [1])
    serving.step([child], [1])
    serving.runtime.table.truncate(parent.row, 5)
    serving.step([parent, child], [1, 1])
    serving.step([parent, child], [7, 1])
    serving.step([parent, child], [1, 1])

    serving, parent, child = parent_and_child(Guards().without("shared_floor"))
    serving.run([parent], [1])
    serving.check_step([parent], [1])
    serving.run([child], [1])
    assert not is_right(serving, [child], [1])


@in_each_way
def test_dropped_pages_are_not_begun_over(provider: str, graphs: bool, device: torch.device) -> None:
    def dropped(guards: Guards) -> tuple[World, Request, KeptIds]:
        """Two pages were kept and dropped; then others are kept."""
        serving = World.one_layer(device, guards, graphs=graphs, provider=provider)
        table = serving.runtime.table
        first, other = serving.begun(8, 8)
        ids = table.kept.keep(first.row, 0, 2)
        table.kept.drop(ids)
        table.kept.keep(other.row, 0, 2)
        return serving, first, ids

    serving, first, ids = dropped(ALL_ON)
    with pytest.raises(WrongState, match="is not the id of a kept page: it was dropped already"):
        begin_over(serving, first, ids, 8)
    serving.step([begin_over(serving, first, serving.runtime.table.kept.keep(first.row, 0, 2), 8)], [1])

    serving, first, ids = dropped(Guards().without("kept_ids"))
    over = begin_over(serving, first, ids, 8)
    serving.run([over], [1])
    assert not is_right(serving, [over], [1])


@in_each_way
def test_tokens_that_were_never_stored_are_not_read(provider: str, graphs: bool, device: torch.device) -> None:
    def with_a_gap(guards: Guards) -> tuple[World, Request, StepBatch]:
        """Three tokens are stored, and a step begins at the eighth."""
        serving = World.one_layer(device, guards, graphs=graphs, provider=provider)
        (request,) = serving.begun(2)
        serving.step([request], [1])
        serving.runtime.table.reserve(request.row, 9)
        return serving, request, StepBatch(np.array([request.row]), np.array([9]), np.array([1]), NO_TOKEN_IDS)

    serving, request, batch = with_a_gap(ALL_ON)
    message = r"sequence 0 attends to the first 8 tokens of row 1, of which 3 are stored in every layer; .*mark_stored"
    with pytest.raises(BadBatch, match=message):
        serving.run_batch([request], [1], batch)
    serving.step([request], [1])

    serving, request, batch = with_a_gap(Guards().without("stored_tokens"))
    serving.run_batch([request], [1], batch)
    assert serving.rows[0].out[0].isnan().all()


# Groups of five requests that share 12 tokens in pages of 4; large steps come before small ones.
GROUPS = (
    [PrefixGroup(5, 12)],
    [PrefixGroup(1, 0), PrefixGroup(2, 8)],
    [PrefixGroup(2, 4), PrefixGroup(3, 12)],
    [PrefixGroup(1, 12)],
    [PrefixGroup(2, 12), PrefixGroup(1, 0), PrefixGroup(1, 12), PrefixGroup(1, 8)],
)


def family(device: torch.device, provider: str, graphs: bool, guards: Guards = ALL_ON) -> tuple[World, list[Request]]:
    """Returns five requests that share 12 tokens and have more of their own."""
    serving = World.one_layer(device, guards, graphs=graphs, provider=provider, shared_prefixes=True)
    (root,) = serving.begun(12)
    requests = [root, *(serving.fork(root, 12) for _ in range(4))]
    serving.step(requests, [2, 1, 3, 1, 4])
    return serving, requests


def groups_once(ops: StepOps) -> StepOps:
    """Derives starts of groups and the lengths after their prefixes once per size, and keeps them."""
    kept: dict[int, list[Tensor]] = {}

    def fill(step: StepTensors, *, page_size: int, window_left: int, chunk: int) -> None:
        ops.fill(step, page_size=page_size, window_left=window_left, chunk=chunk)
        derived = [step.group_indptr, step.suffix_kv_len, step.suffix_page]
        if step.group_indptr.numel():
            first = kept.setdefault(len(step.kv_len), [tensor.clone() for tensor in derived])
            for tensor, value in zip(derived, first, strict=True):
                tensor.copy_(value)

    return replace(ops, fill=fill)


@both_ways
def test_the_groups_of_an_earlier_step_do_not_stay(graphs: bool, provider: str, device: torch.device) -> None:
    def regrouped(guards: Guards) -> tuple[World, list[Request]]:
        serving, requests = family(device, provider, graphs, guards)
        run_shared(serving, requests[:3], GROUPS[1])
        run_shared(serving, requests[:3], [PrefixGroup(3, 12)])
        return serving, requests[:3]

    (full_refresh,) = (guard for guard in GUARDS if guard.id == "full_refresh")
    serving, requests = regrouped(ALL_ON)
    serving.check_step(requests, [1, 1, 1])
    serving, requests = regrouped(full_refresh.put_in(ALL_ON, groups_once))
    assert not is_right(serving, requests, [1, 1, 1])


def run_shared(serving: World, requests: Sequence[Request], groups: Sequence[PrefixGroup]) -> None:
    new = [1] * len(requests)
    serving.run_batch(requests, new, replace(serving.batch(requests, new), prefixes=SharedPrefixes(groups)))


def serve(device: torch.device, provider: str, graphs: bool, before: Callable[[World], None]) -> list[Tensor]:
    """Returns outputs and log-sum-exps of steps in GROUPS, and the first again. before: called ahead of each step"""
    serving, requests = family(device, provider, graphs)
    results = []
    for groups in (*GROUPS, GROUPS[0]):
        before(serving)
        members = requests[: sum(group.num_seqs for group in groups)]
        run_shared(serving, members, groups)
        serving.check_step(members, [1] * len(members))
        results += [tensor[: len(serving.places)].clone() for tensor in (serving.rows[0].out, serving.rows[0].lse)]
    assert serving.runner.counters.replays == (len(GROUPS) + 1 if graphs else 0)
    serving.runtime.check_device()
    return results


@both_ways
def test_a_step_that_shares_writes_all_that_it_reads(graphs: bool, provider: str, device: torch.device) -> None:
    """Covers index buffers, schedules and workspace, prefix outputs included, of graphs and of eager steps."""

    def poison(serving: World) -> None:
        for part in (serving.runtime.core.memory._sealed, serving.runtime.core.memory._open):
            for name, tensor in part.tensors().items():
                if name != "counts":
                    fill_with_nan(tensor)

    clean = serve(device, provider, graphs, lambda serving: None)
    poisoned = serve(device, provider, graphs, poison)
    assert all(torch.equal(one, other) for one, other in zip(clean, poisoned, strict=True))
