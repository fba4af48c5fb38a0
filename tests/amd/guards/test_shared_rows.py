"""What rows share stays as it was stored, and what no step has stored is not read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadBatch
from rocm_attn.guards.registry import Guards
from tests.amd.guards.serving import ALL_ON, PROVIDERS, Serving
from tests.amd.runtime.stepping import Request, take_back

both_ways = pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphed"])


@both_ways
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_row_that_goes_back_leaves_its_forks_alone(provider: str, graphs: bool, device: torch.device) -> None:
    def parent_and_child(guards: Guards) -> tuple[Serving, Request, Request]:
        """Ten tokens in two and a half pages, of which the parent takes five back."""
        serving = Serving(device, guards, graphs=graphs, provider=provider)
        (parent,) = serving.admit(1)
        serving.step([parent], [9])
        serving.step([parent], [1])
        child = serving.world.fork(parent, 10)
        take_back(parent, 5)
        return serving, parent, child

    serving, parent, child = parent_and_child(ALL_ON)
    message = (
        r"sequence 0 would store token 5 of row 1 in a page that another row holds too; "
        r"call truncate\(1, 5\) and reserve\(1, 6\) first"
    )
    with pytest.raises(BadBatch, match=message):
        serving.run([parent], [1])
    serving.step([child], [1])
    serving.runtime.table.truncate(parent.row, 5)
    serving.step([parent, child], [1, 1])
    serving.step([parent, child], [7, 1])
    serving.step([parent, child], [1, 1])

    serving, parent, child = parent_and_child(Guards().without("shared_floor"))
    serving.run([parent], [1])
    serving.check([parent], [1])
    serving.run([child], [1])
    assert not serving.is_right([child], [1])


@both_ways
@pytest.mark.parametrize("provider", PROVIDERS)
def test_tokens_that_were_never_stored_are_not_read(provider: str, graphs: bool, device: torch.device) -> None:
    def with_a_gap(guards: Guards) -> tuple[Serving, Request, StepBatch]:
        """Three tokens are stored, and a step begins at the eighth."""
        serving = Serving(device, guards, graphs=graphs, provider=provider)
        (request,) = serving.admit(1)
        serving.step([request], [2])
        serving.step([request], [1])
        serving.runtime.table.reserve(request.row, 9)
        return serving, request, StepBatch(np.array([request.row]), np.array([9]), np.array([1]))

    serving, request, batch = with_a_gap(ALL_ON)
    message = r"sequence 0 attends to the first 8 tokens of row 1, of which 3 are stored in every layer; .*mark_stored"
    with pytest.raises(BadBatch, match=message):
        serving.run_batch([request], [1], batch)
    serving.step([request], [1])

    serving, request, batch = with_a_gap(Guards().without("stored_tokens"))
    serving.run_batch([request], [1], batch)
    assert serving.out[0].isnan().all()
