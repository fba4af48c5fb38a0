"""A fault is reported even if memory runs out, or the user interrupts, while it is on its way to the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import DeviceFault
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from tests.amd.runtime.interrupts import interrupted_at
from tests.amd.runtime.stepping import small_problem

# Left out under the interpreter by day: the kernels are torch's, and the host stage runs it every time.
pytestmark = pytest.mark.fast(interpreted=0)


def two_faults() -> AttentionRuntime:
    """Returns a runtime after a whole step, 1, and a split one, 2 and 3; 1 and 3 got lengths beyond their bounds."""
    made = build_runtime(
        [small_problem()], RuntimeOptions(num_pages=32, max_num_seqs=2, max_kv_len=16, provider="torch"), device="cpu"
    )
    for _ in range(2):
        row = made.table.admit()
        made.table.reserve(row, 16)
    made.table.mark_stored(np.array([1, 2]), np.array([16, 16]))
    made.step(batch(10, 99))
    made.end_step()
    split = batch(10, 99)
    made.step(split, made.plan(split, halves=2))
    made.end_step()
    return made


def batch(*on_device: int) -> StepBatch:
    """A decode step of both rows at length 10; on_device: the lengths that the device has."""
    arrays = [np.array(values, np.int32) for values in ([1, 2], [10, 10], [1, 1])]
    return StepBatch(*arrays, inputs=DeviceInputs(kv_len=torch.tensor(on_device, dtype=torch.int32)))


class OutOfMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The n-th operation on tensors raises."""

    def __init__(self, n: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = n

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("no memory is left")
        return func(*args, **(kwargs or {}))


def listen(told: set[int], call: Callable[[], object]) -> None:
    """Adds the steps whose faults a call raises, or was about to raise when another error came."""
    try:
        call()
    except DeviceFault as fault:
        told |= steps_of(fault)
    except BaseException as error:
        told |= steps_of(error.__context__)
        raise


def steps_of(error: BaseException | None) -> set[int]:
    lines = str(error).splitlines() if isinstance(error, DeviceFault) else []
    return {int(line.partition(":")[0].removeprefix("step ")) for line in lines}


def go_on(runtime: AttentionRuntime, told: set[int]) -> None:
    """Runs as many whole steps as a report may take."""
    for _ in range(8):
        listen(told, partial(runtime.step, batch(10, 10)))
        runtime.end_step()


CALLS: dict[str, Callable[[AttentionRuntime], object]] = {
    "check_device": lambda runtime: runtime.check_device(),
    "reseal": lambda runtime: runtime.seals.reseal((1, 2)),
    "steps": lambda runtime: runtime.step(batch(10, 10)),
}


# Number of operations, or lines, from one failure to the next.
apart = pytest.mark.parametrize("apart", [7, pytest.param(1, marks=pytest.mark.nightly)])


@pytest.mark.fast(2)
@apart
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("rest", ["steps", "check_device"])
def test_a_fault_is_reported_although_memory_runs_out_while_the_device_is_asked(
    call: str, rest: str, apart: int
) -> None:
    operation, broken = 1, True
    while broken:
        runtime, told, broken = two_faults(), set[int](), False
        try:
            with OutOfMemory(operation):
                listen(told, partial(CALLS[call], runtime))
        except torch.OutOfMemoryError:
            broken = True
        runtime.end_step()
        if rest == "steps":
            go_on(runtime, told)
        else:
            listen(told, runtime.check_device)
        assert told == {1, 3}, f"memory ran out at operation {operation}"
        operation += apart
    assert operation > 3


@pytest.mark.fast(1)
@apart
@pytest.mark.parametrize("call", ["check_device", "steps"])
def test_a_fault_is_reported_although_the_user_interrupts_while_the_device_is_asked(call: str, apart: int) -> None:
    line, broken = 1, True
    while broken:
        runtime, told = two_faults(), set[int]()
        broken = interrupted_at(line, partial(listen, told, partial(CALLS[call], runtime)))
        runtime.end_step()
        listen(told, runtime.check_device)
        go_on(runtime, told)
        assert told == {1, 3}, f"interrupted at line {line}"
        line += apart
    assert line > 20
