"""Rows of the request table: the contents of one row stay out of the others."""

import pytest
import torch

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.errors import BadBatch, CapacityExceeded, DeviceFault
from rocm_attn.guards.registry import Guards
from tests.amd.guards.ways import in_each_way
from tests.amd.worlds.bounds import run_within_bounds
from tests.amd.worlds.world import ALL_ON, Request, World, is_right


def neighbours(serving: World) -> list[Request]:
    """Returns two requests in adjacent rows, with 4 and 8 tokens in pages of 4."""
    requests = serving.admit_all(2)
    assert requests[1].row == requests[0].row + 1
    serving.step(requests, [4, 8])
    return requests


@in_each_way
def test_a_row_filled_past_its_width_stays_out_of_the_next_row(
    provider: str, graphs: bool, device: torch.device
) -> None:
    """Seed 002: five pages for a row that holds four."""
    serving = World.one_layer(device, ALL_ON, graphs=graphs, provider=provider, max_kv_len=16)
    first, second = neighbours(serving)
    with pytest.raises(CapacityExceeded, match="20 tokens exceed the 16 that a row can hold; raise max_kv_len"):
        serving.runtime.table.reserve(first.row, 20)
    serving.step([first, second], [1, 1])

    serving = World.one_layer(device, Guards().without("row_width"), graphs=graphs, provider=provider, max_kv_len=16)
    first, second = neighbours(serving)
    lost = serving.runtime.table.pages_of(second.row)[0]
    serving.runtime.table.reserve(first.row, 20)
    assert serving.runtime.table.pages_of(second.row)[0] != lost
    serving.run([second], [1])
    # Four of its nine tokens are read from a page of the other request, to which nothing was stored.
    assert not is_right(serving, [second], [1])
    assert serving.runtime.table.full.entries[second.row, 0] == serving.runtime.table.pages_of(second.row)[0]


def test_a_length_beyond_the_row_writes_no_other_requests_page(provider: str, device: torch.device) -> None:
    def second_before_and_after(guards: Guards) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K of the second request's first page, before and after a step with too long a first length."""
        serving = World.one_layer(device, guards, graphs=True, provider=provider, max_kv_len=16, capture_sizes=(2,))
        first, second = neighbours(serving)
        runtime = serving.runtime
        page = int(runtime.table.pages_of(second.row)[0])
        before = runtime.pool.layer(0).k[page].clone()
        step = runtime.stage(serving.batch([first, second], [1, 1])).parts[0]
        runtime.seals.tensors()["kv_len"][0] = 17
        runtime.gate.fill()
        step.layers.store(0, serving.random(2, 2, 16), serving.random(2, 2, 16))
        runtime.end_step()
        return before, runtime.pool.layer(0).k[page]

    before, after = second_before_and_after(ALL_ON)
    assert torch.equal(before, after)
    before, after = second_before_and_after(Guards().without("slot_in_row"))
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1:], after[1:])


@in_each_way
def test_requests_that_share_a_page_do_not_write_to_it(provider: str, graphs: bool, device: torch.device) -> None:
    def parent_and_child(guards: Guards) -> tuple[World, list[Request]]:
        """Continues both after a prefix of 6 tokens: one and a half pages."""
        serving = World.one_layer(device, guards, graphs=graphs, provider=provider)
        (parent,) = serving.begun(6)
        family = [parent, serving.fork(parent, 6)]
        serving.run([family[1]], [1])
        serving.run([family[0]], [1])
        serving.run(family, [1, 1])
        return serving, family

    serving, family = parent_and_child(ALL_ON)
    serving.check_step(family, [1, 1])
    serving, family = parent_and_child(Guards().without("copy_on_write"))
    assert not is_right(serving, family, [1, 1])
    # The child's token was overwritten by the parent's.
    slot = serving.runtime.table.pages_of(family[1].row)[1], 2
    stored = serving.runtime.pool.layer(0).k[slot]
    assert torch.equal(stored, family[0].k[0][6])
    assert not torch.equal(stored, family[1].k[0][6])


@in_each_way
def test_a_step_beyond_what_was_reserved_is_refused(provider: str, graphs: bool, device: torch.device) -> None:
    serving = World.one_layer(device, ALL_ON, graphs=graphs, provider=provider)
    requests = neighbours(serving)
    with pytest.raises(BadBatch, match=r"room for 4 tokens; call reserve\(1, 5\) first"):
        serving.run(requests, [1, 1], reserve=False)
    serving.step(requests, [1, 1])

    serving = World.one_layer(device, Guards().without("batch_check"), graphs=graphs, provider=provider)
    requests = neighbours(serving)
    serving.run(requests, [1, 1], reserve=False)
    # Their new tokens went to page 0, which drops them: each attention has one extra key of zeros.
    assert torch.isfinite(serving.rows[0].out[:2]).all()
    assert not is_right(serving, requests, [1, 1])


@in_each_way
def test_a_length_beyond_its_bound_touches_no_other_request(provider: str, graphs: bool, device: torch.device) -> None:
    """The device has more new tokens for the first of two requests than the host has reserved."""

    def run(guards: Guards) -> tuple[World, list[Request]]:
        serving = World.one_layer(device, guards, graphs=graphs, provider=provider, capture_tokens=(16,))
        requests = neighbours(serving)
        q_len = torch.tensor([3, 2], dtype=torch.int32, device=serving.runtime.device)
        run_within_bounds(serving, requests, [2, 2], inputs=lambda kv_len: DeviceInputs(q_len=q_len))
        return serving, requests

    serving, requests = run(ALL_ON)
    serving.check_step(requests, [2, 2])
    with pytest.raises(DeviceFault, match="a length on the device was outside"):
        serving.runtime.check_device()
    serving, requests = run(Guards().without("length_bounds"))
    # The second one's tokens are treated as the tokens after them.
    assert not is_right(serving, requests, [2, 2])
