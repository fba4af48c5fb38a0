"""The host's work in a step, counted in calls and bytecodes: times would show less, and differ between machines."""

import gc
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.check import NO_CHECK
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import WrongState
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.metadata.slot_layout import ECHO
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import LayerKernel, StepBounds
from rocm_attn.providers.launches import StepOps
from rocm_attn.providers.select import Selection
from rocm_attn.providers.torch_ref import TorchDecode
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.core import LaunchGuards, StepGuards
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.prepared import LastCall, _form
from rocm_attn.step.publisher import PublishingGuards
from rocm_attn.step.step import Part
from rocm_lab.faults.wrong_twins import EchoIgnored

PROBLEM = Problem(8, 2, 16, torch.float32, 16, v_head_dim=16, scale=0.25)


def calls_in(work: Callable[[], object]) -> int:
    """Returns the number of calls of Python and C functions."""
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # a collection calls destructors, whenever it comes
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return calls


def bytecodes_in(work: Callable[[], object]) -> int:
    """Returns the number of bytecodes that Python runs. Python 3.11 makes the most of a source."""
    bytecodes = 0

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal bytecodes
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        bytecodes += event == "opcode"
        return count

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return bytecodes


def operations_in(work: Callable[[], object], named: str = "") -> int:
    """Returns the number of torch operations, of all or of those with this in their names."""

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            Counting.count += named in str(func)
            return func(*args, **(kwargs or {}))

    with Counting():  # type: ignore[no-untyped-call]
        work()
    return Counting.count


def _nothing(*args: object, **options: object) -> None:
    """A launch that does nothing."""


def _launch_nothing(ops: StepOps) -> StepOps:
    return replace(ops, **{field.name: _nothing for field in fields(ops)})


@dataclass(frozen=True, slots=True)
class _AttendsNothing(TorchDecode):
    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        pass


def _attend_nothing(selection: Selection) -> Selection:
    kernel = _AttendsNothing(selection.problem)
    return replace(
        selection, kernels={kind: LayerKernel(each.entry, kernel) for kind, each in selection.kernels.items()}
    )


class _Replays:
    """A stand-in for a graph that only has its head: it takes the inputs of its step."""

    bytes = 0

    def __init__(self, slots: Tensor) -> None:
        self._words = slots.numpy().reshape(-1)
        self._echoes = slice(ECHO, None, slots.shape[1])

    def replay(self) -> None:
        self._words[self._echoes] = 0


class _Recorder:
    def __init__(self, runtime: AttentionRuntime) -> None:
        self._slots = runtime.gate._publisher._lines[0].ring.slots

    def record(self, fn: Callable[[], Any]) -> tuple[_Replays, Any]:
        return _Replays(self._slots), fn()

    def release_memory(self) -> None:
        pass


class Server:
    """Decodes sequences by replayed steps, each of which adds a token to all of them."""

    def __init__(self, num_seqs: int) -> None:
        launches = LaunchGuards(pads=_launch_nothing, v_mask=_attend_nothing)
        guards = Guards(
            step=StepGuards(launches=launches),
            publishing=PublishingGuards(new_echo_check=EchoIgnored, of_last_step=lambda counts, number: None),
        )
        options = RuntimeOptions(
            num_pages=num_seqs * 16 + 1,
            max_num_seqs=num_seqs,
            max_num_rows=num_seqs + 1,
            max_kv_len=256,
            provider="torch",
            capture_sizes=[num_seqs],
        )
        self.runtime = build_runtime([PROBLEM] * 2, options, device="cpu", guards=guards)
        self.q, self.out = torch.zeros(num_seqs, 8, 16), torch.zeros(num_seqs, 8, 16)
        self.runner = StepRunner(self.runtime, self.forward, _Recorder(self.runtime), check=NO_CHECK)
        table = self.runtime.table
        self.rows = np.array([table.admit() for _ in range(num_seqs)], np.int32)
        self.kv_len = np.full(num_seqs, 130, np.int32)
        self.ones = np.ones(num_seqs, np.int32)
        table.reserve_all(self.rows, self.kv_len)
        table.mark_stored(self.rows, self.kv_len)
        for _ in range(3):
            self.runner.run(self.next())

    def forward(self, step: Part) -> Tensor:
        k = torch.zeros(len(self.out), 2, 16)
        for layer in range(2):
            step.layers.store_and_attend(layer, self.q, k, k, self.out)
        return self.out

    def next(self) -> StepBatch:
        self.kv_len = self.kv_len + 1
        self.runtime.table.reserve_all(self.rows, self.kv_len)
        return self.make_batch()

    def next_of(self, num_seqs: int) -> StepBatch:
        """The next step of the first sequences."""
        rows, kv_len = self.rows[:num_seqs], self.kv_len[:num_seqs] + 1
        self.runtime.table.reserve_all(rows, kv_len)
        self.kv_len = np.concatenate((kv_len, self.kv_len[num_seqs:]))
        return StepBatch(rows, kv_len, self.ones[:num_seqs], rows)

    def make_batch(self) -> StepBatch:
        return StepBatch(self.rows, self.kv_len, self.ones, self.rows)


def test_a_replayed_step_makes_few_calls_however_many_sequences_it_has() -> None:
    counts = []
    for num_seqs in (1, 64):
        server = Server(num_seqs)
        replays = server.runner.counters.replays
        calls = calls_in(partial(server.runner.run, server.next()))
        counts.append((calls, bytecodes_in(partial(server.runner.run, server.next()))))
        assert server.runner.counters.replays == replays + 2
    assert counts[0] == counts[1]
    calls, bytecodes = counts[0]
    assert 20 < calls <= 45
    assert 500 < bytecodes <= 995
    assert calls_in(server.make_batch) <= 26


def test_a_replayed_step_of_other_sequences_than_the_last_one_makes_no_parts() -> None:
    """It checks its rows, and cuts its outputs by one operation of torch."""
    server, found = Server(64), list[int]()
    for count in (operations_in, calls_in, bytecodes_in):
        for num_seqs in (63, 64):
            server.runner.run(server.next_of(num_seqs))
        replays = server.runner.counters.replays
        found.append(count(partial(server.runner.run, server.next_of(63))))
        assert server.runner.counters.replays == replays + 1
    operations, calls, bytecodes = found
    assert operations == 1
    assert 46 < calls <= 78
    assert 1000 < bytecodes <= 1350


def test_a_layer_that_stores_and_attends_again_makes_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it repeats its launches. Here they are one call of a function, on a stream of any number."""
    server, stream, launched = Server(8), 7, list[tuple[object, ...]]()
    layers, step = server.runtime.core.layers, server.runtime.step(server.next())
    monkeypatch.setattr(layers, "_launches_alone", True)
    monkeypatch.setattr(layers.forms, "_stream", partial([stream].__getitem__, 0))
    q, out, k, v = (torch.zeros(8, heads, 16) for heads in (8, 8, 2, 2))
    addresses, forms = zip(*((each.data_ptr(), _form(each)) for each in (k, v, q, out)), strict=True)
    owners = server.runtime.pool.layer(0), server.runtime.head_weights.of(0)
    launches = ((launched.append, (("launched",),)),)
    step.children[0].prepared.both[0] = LastCall(stream, addresses, forms, owners, launches)
    again = partial(step.parts[0].layers.store_and_attend, 0, q, k, v, out)
    again()
    calls, bytecodes = calls_in(again), bytecodes_in(again)
    assert launched == [("launched",)] * 3
    assert 10 < calls <= 20
    assert 100 < bytecodes <= 240


def test_a_replayed_step_runs_no_operation_of_torch() -> None:
    server = Server(8)
    batch = server.next()
    assert operations_in(lambda: server.runner.run(batch)) == 0
    assert operations_in(lambda: server.out.zero_()) == 1, "one that is run is counted"


def test_room_within_pages_is_reserved_by_few_calls() -> None:
    """This also holds for rows that have shared a page, once each has its own."""
    server = Server(16)
    table, rows = server.runtime.table, server.rows

    def within_pages() -> int:
        server.kv_len = server.kv_len + 1
        return calls_in(lambda: table.reserve_all(rows, server.kv_len))

    counts = [within_pages() for _ in range(3)]
    assert counts == [counts[0]] * 3
    assert counts[0] <= 12
    table.free(int(rows[1]))
    rows[1] = table.fork(int(rows[0]), int(server.kv_len[0]))
    assert within_pages() > 20, "a shared page is looked at, and copied"
    assert table.pages_of(int(rows[0]))[-1] != table.pages_of(int(rows[1]))[-1]
    within_pages()
    table.checks.check(StepBatch(rows, server.kv_len, server.ones))  # the check shows that the rows are distinct
    assert within_pages() == counts[0]


class _Rounds(Server):
    """Steps that run again on inputs that the device has replaced."""

    def again(self) -> None:
        self.runner.run_again(self.batch)

    def begin(self) -> None:
        self.batch = self.next()
        self.runner.run(self.batch)
        self.again()


def test_a_step_that_runs_again_makes_few_calls_and_no_operation_of_torch() -> None:
    counts = []
    for num_seqs in (1, 64):
        server = _Rounds(num_seqs)
        server.begin()
        replays = server.runner.counters.replays
        counts.append((calls_in(server.again), bytecodes_in(server.again)))
        assert server.runner.counters.replays == replays + 2
        assert operations_in(server.again) == 0
    assert counts[0] == counts[1]
    calls, bytecodes = counts[0]
    server.runtime.table.admit()
    assert calls_in(server.again) > calls, "the step's rows are compared with those that have changed"
    server.again()
    assert calls_in(server.again) == calls, "they are compared once"
    server.runtime.table.truncate(int(server.rows[5]), 3)
    with pytest.raises(WrongState, match=f"row {server.rows[5]} was freed, cut"):
        server.again()
    assert 10 < calls <= 28
    assert 200 < bytecodes <= 430


def test_a_check_of_the_device_reads_it_as_often_with_many_layers_as_with_few() -> None:
    """An engine that becomes idle checks the device before it hands out its last tokens."""
    reads = []
    for layers in (1, 9):
        options = RuntimeOptions(num_pages=17, max_num_seqs=1, max_kv_len=256, provider="torch")
        runtime = build_runtime([PROBLEM] * layers, options, device="cpu")
        reads.append(operations_in(runtime.check_device, "_local_scalar_dense"))
    assert reads[0] == reads[1] > 0
