"""On a GPU that is late, or not the current one: nothing waits, allocates or reads another step's inputs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import DeviceFault
from rocm_attn.step.memory import DeviceStep
from tests.amd.graphs.small_models import Requests, Tiny, come_and_go, same
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import World

pytestmark = pytest.mark.gpu

NUM_STEPS = 12
SLEEP_CYCLES = 20_000_000  # some 10 ms; a step is a few hundred us of host time


@dataclass
class Decoding:
    """Three requests of a tiny model after their prompts and a first decode step, whose graph is made."""

    tiny: Tiny
    runner: StepRunner
    requests: Requests

    @classmethod
    def begin(cls, device: torch.device) -> Decoding:
        tiny = Tiny.build(device, "triton", [4])
        runner = tiny.runner()
        requests = tiny.admitted(3)
        requests.run(runner, [5, 2, 7])
        requests.run(runner, [1, 1, 1])
        torch.cuda.synchronize(device)
        return cls(tiny, runner, requests)

    def step(self) -> Tensor:
        """The rows of one more decode step; pages are crossed on the way."""
        return self.requests.run(self.runner, [1, 1, 1])

    def batch_on_device(self, kv_len: Tensor) -> StepBatch:
        """The same step, of which the host knows bounds only."""
        batch = self.requests.batch([1, 1, 1])
        return replace(batch, inputs=DeviceInputs(kv_len=kv_len))


def sleep() -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]


def sleep_after_stage(decoding: Decoding) -> None:
    """From now on the stream sleeps before each replay, and after the launches that publish its step."""
    publisher = decoding.tiny.runtime.gate._publisher
    publish = publisher.publish

    def published(batch: StepBatch, step: DeviceStep, child: int, *, to_graph: bool = False) -> None:
        publish(batch, step, child, to_graph=to_graph)
        sleep()

    publisher.publish = published  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def undelayed(device: torch.device) -> list[Tensor]:
    """The rows of NUM_STEPS decode steps with the device idle before each."""
    decoding = Decoding.begin(device)
    rows = []
    for _ in range(NUM_STEPS):
        rows.append(decoding.step())
        torch.cuda.synchronize(device)
    assert decoding.runner.counters.replays == NUM_STEPS + 1
    return rows


@pytest.mark.parametrize("where", ["before publish", "before replay"])
def test_the_host_runs_ahead_of_a_delayed_stream(where: str, undelayed: list[Tensor], device: torch.device) -> None:
    """The ring has two slots: when a step is staged, its graph is to come and that of the step before."""
    decoding = Decoding.begin(device)
    if where == "before replay":
        sleep_after_stage(decoding)
    rows, done, ahead = [], [], 0
    for _ in range(NUM_STEPS):
        if where == "before publish":
            sleep()
        rows.append(decoding.step())
        done.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        done[-1].record()
        ahead = max(ahead, sum(not event.query() for event in done))  # type: ignore[no-untyped-call]
    assert ahead >= 2
    decoding.tiny.runtime.check_device()
    for late, right in zip(rows, undelayed, strict=True):
        assert torch.equal(late, right)


def test_lengths_of_a_delayed_device_are_read_when_it_gets_there(undelayed: list[Tensor], device: torch.device) -> None:
    """The tensor is written on the stream, after a sleep, long after the host has staged the step."""
    decoding = Decoding.begin(device)
    kv_len = torch.tensor(decoding.requests.kv_len, dtype=torch.int32, device=device)
    rows = []
    for _ in range(NUM_STEPS):
        sleep()
        kv_len.add_(1)
        rows.append(decoding.runner.run(decoding.batch_on_device(kv_len)).clone())
    decoding.tiny.runtime.check_device()
    assert decoding.runner.counters.replays == NUM_STEPS + 1
    for late, right in zip(rows, undelayed, strict=True):
        assert torch.equal(late, right)


def test_a_fault_of_a_delayed_device_is_reported_once(undelayed: list[Tensor], device: torch.device) -> None:
    """Cut to its bound, the wrong length gives right rows, here and in every later step."""
    decoding = Decoding.begin(device)
    sleep_after_stage(decoding)
    now = torch.tensor(decoding.requests.kv_len, dtype=torch.int32, device=device)
    lengths = [now + 1 + at + 5 * (at == 1) for at in range(NUM_STEPS)]
    rows, reported = [], []
    for at in range(NUM_STEPS):
        batch = decoding.batch_on_device(lengths[at])
        try:
            rows.append(decoding.runner.run(batch).clone())
        except DeviceFault as fault:
            reported.append((at, fault.step))
            rows.append(decoding.runner.run(batch).clone())
    decoding.tiny.runtime.check_device()
    ((at, step),) = reported
    assert at == 4
    assert step is not None
    assert decoding.tiny.runtime.faults.step_number - step == NUM_STEPS - 2
    for late, right in zip(rows, undelayed, strict=True):
        assert torch.equal(late, right)


def test_two_runtimes_on_two_streams_keep_apart(undelayed: list[Tensor], device: torch.device) -> None:
    served = [Decoding.begin(device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in served]  # type: ignore[no-untyped-call]
    rows: list[list[Tensor]] = [[], []]
    for at in range(NUM_STEPS):
        for which, (decoding, stream) in enumerate(zip(served, streams, strict=True)):
            with torch.cuda.stream(stream):
                if (at + which) % 3 == 0:
                    sleep()
                rows[which].append(decoding.step())
    torch.cuda.synchronize(device)
    for decoding, late_rows in zip(served, rows, strict=True):
        decoding.tiny.runtime.check_device()
        for late, right in zip(late_rows, undelayed, strict=True):
            assert torch.equal(late, right)


def test_a_step_outlives_its_runtime(undelayed: list[Tensor], device: torch.device) -> None:
    """Pinned memory that is dropped while a step waits to read it goes to no other owner, which would write there."""

    def prefilled() -> tuple[StepRunner, Requests]:
        tiny = Tiny.build(device, "triton", [4])
        requests = tiny.admitted(3)
        runner = tiny.runner(graphs=False)
        requests.run(runner, [5, 2, 7])
        requests.run(runner, [1, 1, 1])
        return runner, requests

    served = prefilled()
    torch.cuda.synchronize(device)
    torch.cuda._sleep(100 * SLEEP_CYCLES)  # type: ignore[no-untyped-call] # longer than a garbage collection
    rows = served[1].run(served[0], [1, 1, 1])
    slot_words = served[1].runtime.gate._publisher._lines[0].ring.slots.numel()
    del served
    gc.collect()
    # The blocks of that size that are free; of a step they say that it has no sequence.
    taken = [torch.zeros(slot_words, dtype=torch.int32, pin_memory=True) for _ in range(20)]
    torch.testing.assert_close(rows, undelayed[0])
    assert len(taken) == 20


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Every call that waits for the device without an explicit request raises."""
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_audit_sees_a_synchronisation(device: torch.device) -> None:
    with no_synchronisation(), pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones(1, device=device).item()


@pytest.mark.parametrize("lengths", ["on the host", "on the device"])
def test_replayed_steps_neither_synchronise_nor_allocate(lengths: str, device: torch.device) -> None:
    """From the StepBatch to the rows, over page boundaries, with 40 steps in a row."""
    decoding = Decoding.begin(device)
    kv_len = torch.tensor(decoding.requests.kv_len, dtype=torch.int32, device=device)

    def on_host() -> StepBatch:
        return decoding.requests.batch([1, 1, 1])

    def on_device() -> StepBatch:
        kv_len.add_(1)
        return decoding.batch_on_device(kv_len)

    next_batch: Callable[[], StepBatch] = on_host if lengths == "on the host" else on_device
    decoding.runner.run(next_batch())  # compiles and caches at first use
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)
    with no_synchronisation():
        for _ in range(40):
            rows = decoding.runner.run(next_batch())
    torch.cuda.synchronize(device)
    after = torch.cuda.memory_stats(device)
    for counter in ("allocation.all.allocated", "segment.all.allocated", "allocation.all.freed"):
        assert after[counter] == before[counter], counter
    assert torch.isfinite(rows).all()
    assert np.array_equal(kv_len.cpu(), decoding.requests.kv_len) == (lengths == "on the device")
    assert decoding.runner.counters.replays == 42
    decoding.tiny.runtime.check_device()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("provider", ["torch", "triton"])
def test_a_runtime_works_on_a_gpu_that_is_not_the_current_one(provider: str) -> None:
    device = torch.device("cuda", 1)
    with torch.cuda.device(0):
        world = World.build([small_problem()], device, provider)
        requests = world.begun(5, 1, 9)
        world.step(requests, [1, 1, 1])
        outs = []
        for graphs in (False, True):
            tiny = Tiny.build(device, provider)
            runner = tiny.runner(graphs=graphs)
            outs.append(come_and_go(runner, tiny.runtime, [3, 5, 1]))
        assert torch.cuda.current_device() == 0
    assert all(out.device == device for out in outs[0])
    assert same(*outs)


@pytest.mark.parametrize("provider", ["torch", "triton"])
def test_a_step_on_another_stream_starts_after_the_last_one(provider: str, device: torch.device) -> None:
    world = World.build([small_problem()], device, provider)
    requests = world.begun(3, 8)
    for _ in range(4):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            # The next work on other streams must wait for this step.
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            world.step(requests, [1, 1])
        torch.cuda.current_stream(device).wait_stream(stream)
    world.step(requests, [1, 2])
