"""Data that rows share stays unchanged, and data that no step has stored is not read."""

import numpy as np
import pytest
import torch

from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.errors import BadBatch, WrongState
from rocm_attn.guards.registry import Guards
from rocm_attn.paging.kept_pages import KeptIds
from tests.amd.guards.ways import in_each_way
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
    assert serving.out[0].isnan().all()
