"""Faults that no ordinary next step reports: of last steps, of second halves, and of steps before a failed launch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.errors import DeviceFault
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.metadata.error_word import TOKEN_WITHOUT_PAGE
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.host_ring import HostRing
from tests.amd.guards.late_device import LateDevice
from tests.amd.worlds.two_rows import decode_of_both, run_split, run_whole, runtime_of_two_rows
from tests.amd.worlds.world import ALL_ON, World

CPU = torch.device("cpu")


def faults(call: Callable[[], None], times: int) -> list[tuple[int | None, tuple[int, ...]]]:
    reported = []
    for _ in range(times):
        try:
            call()
        except DeviceFault as fault:
            reported.append((fault.step, fault.rows))
    return reported


def fails(*arguments: Any, **named: Any) -> None:
    raise RuntimeError("the launch failed")


def test_a_fault_of_the_last_step_is_reported_when_serving_ends() -> None:
    def served(guards: Guards) -> AttentionRuntime:
        made = runtime_of_two_rows(guards)
        run_whole(made, decode_of_both())
        run_whole(made, decode_of_both(10, 99))
        return made

    with pytest.raises(DeviceFault, match="step 2: a length on the device was outside"):
        served(ALL_ON).check_device()
    served(Guards().without("last_steps")).check_device()


def test_all_faults_are_reported_together() -> None:
    """The faults are of an earlier step, whose echo waits in a slot, and of both halves of the last one."""
    made = runtime_of_two_rows()
    run_whole(made, decode_of_both(10, 99))
    run_split(made, decode_of_both(99, 99))
    with pytest.raises(DeviceFault) as raised:
        made.check_device()
    assert [line.partition(":")[0] for line in str(raised.value).splitlines()] == ["step 1", "step 2", "step 3"]
    assert raised.value.step == 1
    assert raised.value.rows == (1, 2)
    made.check_device()
    assert faults(lambda: run_whole(made, decode_of_both()), 6) == []


@pytest.mark.parametrize("before", [0, 1, 2, 3], ids=lambda count: f"{count} split steps before")
@pytest.mark.parametrize("half", [0, 1], ids=["first half", "second half"])
def test_a_fault_of_either_half_is_reported_by_whole_steps(half: int, before: int) -> None:
    made = runtime_of_two_rows()
    run_whole(made, decode_of_both())
    for _ in range(before):
        run_split(made, decode_of_both())
    run_split(made, decode_of_both(10 + 89 * (half == 0), 10 + 89 * (half == 1)))
    wrong = made.faults.step_number - 1 + half
    assert faults(lambda: run_whole(made, decode_of_both()), 6) == [(wrong, (1 + half,))]
    made.check_device()


@pytest.mark.parametrize("launch", ["publish", "device_inputs"])
def test_a_fault_is_kept_when_a_launch_of_the_next_step_fails(launch: str) -> None:
    made = runtime_of_two_rows()
    run_whole(made, decode_of_both(10, 99))
    ops = made.gate._publisher._ops

    broken: dict[str, Any] = {launch: fails}
    made.gate._publisher._ops = replace(ops, **broken)
    # Only one failure if the first launch succeeds: the next try has the echo.
    for _ in range(3 if launch == "publish" else 1):
        with pytest.raises(RuntimeError, match="the launch failed"):
            made.step(decode_of_both(10, 10))
    made.gate._publisher._ops = ops
    assert faults(lambda: run_whole(made, decode_of_both(10, 10)), 6) == [(1, (1, 2))]
    made.check_device()


def test_the_host_leaves_a_slot_alone_that_a_late_device_has_yet_to_echo_into() -> None:
    """A later launch of the step fails before the device has begun; the previous step's echo arrives after that."""
    serving, late = World.one_layer(CPU, graphs=False), LateDevice()
    publisher = serving.runtime.gate._publisher

    ops = replace(publisher._ops, publish=late.later(publisher._ops.publish))
    publisher._ops = ops
    publisher._lines[0].ring = HostRing(CPU, depth=2, new_fence=late.fence)
    (request,) = serving.admit_all(1)
    serving.runtime.table.reserve(request.row, 1)
    one = np.array([1], np.int32)
    plain = StepBatch(np.array([request.row]), one, one, NO_TOKEN_IDS)
    known_to_the_device = DeviceInputs(kv_len=torch.ones(1, dtype=torch.int32))
    given = StepBatch(plain.rows, one, one, NO_TOKEN_IDS, inputs=known_to_the_device)
    counts = serving.runtime.stage(plain).children[0].tensors.counts
    late.launch(lambda: counts[3].fill_(TOKEN_WITHOUT_PAGE))
    serving.runtime.end_step()
    publisher._ops = replace(ops, device_inputs=fails)
    with pytest.raises(RuntimeError, match="the launch failed"):
        serving.runtime.stage(given)
    publisher._ops = ops

    def stage() -> None:
        serving.runtime.stage(plain)
        serving.runtime.end_step()

    assert [number for number, _ in faults(stage, 6)] == [1]
    late.drain()
    serving.runtime.check_device()
