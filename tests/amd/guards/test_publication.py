"""The host's decisions reach the device before the step that needs them, complete, even if something fails."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.errors import DeviceFault
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.metadata.slot_layout import slot_parts
from rocm_attn.kernels.metadata.step_tensors import Pads, StepTensors
from rocm_attn.kernels.refs.metadata import publish
from rocm_attn.paging.index_spaces import Space
from rocm_attn.step.host_ring import HostRing
from tests.amd.guards.late_device import LateDevice
from tests.amd.guards.ways import PROVIDERS, in_each_way
from tests.amd.worlds.bounds import run_within_bounds
from tests.amd.worlds.world import ALL_ON, Request, World, is_right


@in_each_way
def test_pages_reach_the_device_before_the_step_that_uses_them(
    provider: str, graphs: bool, device: torch.device
) -> None:
    def across_a_page(guards: Guards) -> tuple[World, list[Request]]:
        """A page is full; the next token goes to a new one."""
        serving = World.one_layer(device, guards, graphs=graphs, provider=provider)
        requests = serving.admit_all(2)
        serving.run(requests, [4, 2])
        serving.run(requests, [1, 1])
        return serving, requests

    serving, requests = across_a_page(ALL_ON)
    serving.check_step(requests, [1, 1])
    serving, requests = across_a_page(Guards().without("table_first").without("echo_check"))
    assert not is_right(serving, requests, [1, 1])
    # The device knows only the first page; the entry of this step's page is still page 0, where the token was dropped.
    assert serving.runtime.table.full.entries[requests[0].row, 0] > 0
    assert serving.runtime.table.full.entries[requests[0].row, 1] == 0


class Fails:
    """Raises at the first call, and works after that."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call
        self._failed = False

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not self._failed:
            self._failed = True
            raise RuntimeError("the launch failed")
        self._call(*args, **kwargs)


@pytest.mark.fast
@pytest.mark.parametrize("launch", ["table_update", "copy_pages"])
@in_each_way
def test_changes_survive_a_launch_that_fails(
    provider: str, launch: str, graphs: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried_again(guards: Guards) -> tuple[World, list[Request]]:
        """A fork continues in a copy of the page that it shares; the launch fails at the first attempt."""
        serving = World.one_layer(device, guards, graphs=graphs, provider=provider)
        (parent,) = serving.admit_all(1)
        serving.run([parent], [6])
        family = [parent, serving.fork(parent, 6)]
        publisher, pool = serving.runtime.gate._publisher, serving.runtime.pool.in_space(Space.FULL)
        if launch == "table_update":
            publisher._ops = replace(publisher._ops, table_update=Fails(publisher._ops.table_update))
        else:
            monkeypatch.setattr(pool, "copy_pages", Fails(pool.copy_pages))
        with pytest.raises(RuntimeError, match="the launch failed"):
            serving.run(family, [1, 1])
        serving.run(family, [1, 1])
        return serving, family

    serving, family = tried_again(ALL_ON)
    serving.check_step(family, [1, 1])
    serving, family = tried_again(Guards().without("pending_changes"))
    assert not is_right(serving, family, [1, 1])


@pytest.mark.parametrize("failing_call", [1, 2])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_copies_that_failed_half_way_are_made_again_from_the_same_pages(
    provider: str, failing_call: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried_again(guards: Guards) -> tuple[World, list[Request]]:
        """Two forks continue in copies. The page of the first copy becomes free, and would be the second's target."""
        serving = World.one_layer(device, guards, graphs=False, provider=provider)
        parents = serving.admit_all(2)
        serving.run(parents, [6, 6])
        forks = [serving.fork(parent, 6) for parent in parents]
        table = serving.runtime.table
        table.reserve(forks[0].row, 7)
        serving.free(parents[0])
        table.reserve(forks[1].row, 7)
        copy, calls = torch.Tensor.index_copy_, iter(range(1, 100))

        def fails_once(pages: torch.Tensor, *args: Any) -> torch.Tensor:
            if next(calls) == failing_call:
                raise torch.OutOfMemoryError("no memory for the copy")
            return copy(pages, *args)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "index_copy_", fails_once)
            with pytest.raises(torch.OutOfMemoryError):
                serving.run(forks, [1, 1])
        serving.run(forks, [1, 1])
        return serving, forks

    serving, forks = tried_again(ALL_ON)
    serving.check_step(forks, [1, 1])
    serving, forks = tried_again(Guards().without("copy_sources"))
    # K is copied before V: the overwritten part is the V of neither, or the K of the first alone.
    assert is_right(serving, forks, [1, 1]) == (failing_call == 1)


def published_lengths(guards: Guards, num_steps: int) -> list[int]:
    """Returns kv_len as each of num_steps steps finds it, on a device that starts late, after a ring of two slots."""
    late = LateDevice()
    ring = HostRing(torch.device("cpu"), depth=2, wait=guards.publishing.ring_wait, new_fence=late.fence)
    found: list[int] = []
    counts, row, kv_len, q_len, ids = (torch.zeros(n, dtype=torch.int32) for n in (4, 1, 1, 1, 1))
    nothing = torch.zeros(0, dtype=torch.int32)
    to = StepTensors.of(nothing, Pads(0, 1), counts=counts, row_of_seq=row, kv_len=kv_len, q_len=q_len, token_ids=ids)
    for step in range(num_steps):
        parts = slot_parts(1, 0)
        slot = ring.acquire(parts.first_writable.stop).tensor
        slot[: parts.q_len.stop] = torch.tensor([1, 1, step, 0, 0, 0, 0, 0, 1, 100 + step, 1])
        late.launch(partial(publish, slot, counts, to))
        late.launch(lambda: found.append(int(kv_len[0])))
        ring.release()
    late.drain()
    return found


def test_a_late_device_still_reads_its_own_steps_inputs() -> None:
    assert published_lengths(ALL_ON, 5) == [100, 101, 102, 103, 104]
    # The host ran ahead and has written each slot for the last time before the device reads it.
    assert published_lengths(Guards().without("ring_wait"), 5) == [104, 103, 104, 103, 104]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_graphs_take_their_inputs_until_a_step_was_too_long_for_their_slots(
    provider: str, device: torch.device
) -> None:
    """Later inputs are published, like those of steps with more inputs than rows and lengths of the host."""
    serving = World.one_layer(device, graphs=True, provider=provider)
    requests = serving.admit_all(2)
    publisher, launched = serving.runtime.gate._publisher, 0
    launch = publisher._ops.publish

    def publish(slot: torch.Tensor, counts_before: torch.Tensor, to: StepTensors) -> None:
        nonlocal launched
        launched += 1
        launch(slot, counts_before, to)

    for q_len in ([4, 2], [1, 1]):
        serving.step(requests, q_len)
    publisher._ops = replace(publisher._ops, publish=publish)
    for _ in range(3):
        serving.step(requests, [1, 1])
    takes = device.type == "cpu" or provider != "torch"
    assert launched == (0 if takes else 3)
    ring = publisher._lines[0].ring
    ring.acquire(ring.slots.shape[1] + 1)
    for _ in range(3):
        serving.step(requests, [1, 1])
    assert launched == (3 if takes else 6)
    serving.runtime.check_device()


@in_each_way
def test_a_fault_on_the_device_is_reported_once_and_later_steps_are_right(
    provider: str, graphs: bool, device: torch.device
) -> None:
    def faults_of(guards: Guards) -> tuple[int, list[DeviceFault]]:
        """Gives the third step a length beyond its bound. Returns the errors of the steps after it."""
        serving = World.one_layer(device, guards, graphs=graphs, provider=provider)
        requests = serving.begun(3, 5)
        serving.step(requests, [1, 1])
        faulty_step = serving.runtime.faults.step_number + 1
        run_within_bounds(
            serving,
            requests,
            [1, 1],
            inputs=lambda kv_len: DeviceInputs(
                kv_len=torch.tensor([kv_len[0] + 9, kv_len[1]], dtype=torch.int32, device=serving.runtime.device)
            ),
        )
        faults = []
        for _ in range(6):
            try:
                serving.step(requests, [1, 1])
            except DeviceFault as fault:
                faults.append(fault)
                serving.step(requests, [1, 1])
        return faulty_step, faults

    step, (fault,) = faults_of(ALL_ON)
    assert fault.step == step
    assert str(fault).startswith(f"step {step}: a length on the device was outside of 0 <= q_len <= kv_len <= ")
    assert faults_of(Guards().without("echo_check")) == (step, [])
