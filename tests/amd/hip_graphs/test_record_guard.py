"""Calls that a recording cannot repeat are refused while it is recorded, at the line that makes them."""

import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_attn.hip_graphs.errors import RecordingRefused
from rocm_attn.hip_graphs.record_guard import RecordGuard
from tests.amd.hip_graphs.recorders import Lab
from tests.amd.runtime.interrupts import interrupted_at


def _unbound(owner: type, method: str) -> Any:
    return getattr(owner, method)(None)  # refused before it checks its object


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 0),
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x.sum()),
    "cpu": lambda x: x.cpu(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "apply_": lambda x: x.apply_(abs),
    "map_": lambda x: x.map_(x, max),
    "map2_": lambda x: x.map2_(x, x, lambda one, other, third: one),
    "printed": lambda x: str(x),
    "formatted": lambda x: f"{x}",
    "nonzero": lambda x: x.nonzero(),
    "nonzero function": lambda x: torch.nonzero(x),
    "select by mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "put at a mask": lambda x: x.index_put_((x > 0,), x[:1].expand(int(x.numel()))[:2]),
    "unique": lambda x: torch.unique_consecutive(x),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x.long()),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "one_where": lambda x: torch.where(x > 0),
    "python values": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
    "index list": lambda x: x[[0, 2]],
    "one number set": lambda x: x.__setitem__(0, 3.0),
    "one number copied": lambda x: x.copy_(torch.tensor(3.0)),
    "one number put": lambda x: x.__setitem__(torch.arange(2, device=x.device), 3.0),
    "one device number put at a mask": lambda x: x.__setitem__(x > 0, x[0]),
    "rand": lambda x: torch.rand(4, device=x.device),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
    "multinomial": lambda x: torch.multinomial(x.abs(), 1),
    "resize": lambda x: x.clone().resize_(100),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "empty_cache": lambda x: torch.cuda.empty_cache(),
    "accelerator": lambda x: torch.accelerator.synchronize(),
    "event query": lambda x: _unbound(torch.cuda.Event, "query"),
    "event wait": lambda x: _unbound(torch.cuda.Event, "synchronize"),
    "stream query": lambda x: _unbound(torch.cuda.Stream, "query"),
    "stream wait": lambda x: _unbound(torch.cuda.Stream, "synchronize"),
}


@pytest.mark.parametrize("reads", [pytest.param(reads, id=name) for name, reads in REFUSED.items()])
def test_what_cannot_be_repeated_is_refused_with_the_place_in_the_callers_code(
    lab: Lab, reads: Callable[[Tensor], Any]
) -> None:
    x = torch.tensor([1.0, -2.0, 3.0, 4.0], device=lab.device)
    with pytest.raises(RecordingRefused) as raised, torch.no_grad(), RecordGuard(lab.device):
        reads(x)
    place = reads if "_unbound" not in inspect.getsource(reads) else _unbound
    line = inspect.getsourcelines(place)[1] + (place is _unbound)
    assert f"{__file__}:{line} " in str(raised.value)
    assert ";" in str(raised.value)  # the remedy


@pytest.mark.parametrize("reads", [REFUSED["item"], REFUSED["select by mask"], REFUSED["repeat_interleave"]])
def test_inference_mode_hides_nothing(reads: Callable[[Tensor], Any]) -> None:
    x = torch.ones(4)
    with pytest.raises(RecordingRefused), torch.inference_mode(), RecordGuard(x.device):
        reads(x)


ALLOWED: dict[str, Callable[[Tensor], Any]] = {
    "one number filled in": lambda x: x[0].fill_(3.0),
    "one number in a slice": lambda x: x.__setitem__(slice(0, 2), 3.0),
    "one element to another": lambda x: x.__setitem__(0, x[1]),
    "one number at indices": lambda x: x.index_fill_(0, torch.arange(2, device=x.device), 3.0),
    "one number at a mask": lambda x: x.__setitem__(x > 0, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "known repeat": lambda x: torch.repeat_interleave(x, 2),
    "index by tensor": lambda x: x[torch.arange(2, device=x.device)],
    "cast": lambda x: x.to(torch.float16),
    "host number": lambda x: x * torch.tensor(3.0),
    "attention without dropout": lambda x: torch.nn.functional.scaled_dot_product_attention(
        x.view(1, 1, 2, 2), x.view(1, 1, 2, 2), x.view(1, 1, 2, 2), is_causal=True
    ),
    "topk": lambda x: x.topk(2),
}


@pytest.mark.parametrize("does", [pytest.param(does, id=name) for name, does in ALLOWED.items()])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_work_that_stays_on_the_device_passes(lab: Lab, mode: Callable[[], Any], does: Callable[[Tensor], Any]) -> None:
    with mode():
        x = torch.ones(4, device=lab.device)
        with RecordGuard(lab.device):
            does(x)


def test_copies_from_memory_that_can_be_paged_out_are_refused() -> None:
    # "meta" stands in for another device: the decision depends only on devices and page-locking.
    target, host = torch.empty(4, device="meta"), torch.ones(4)
    guard = RecordGuard(torch.device("meta"))
    with pytest.raises(RecordingRefused, match=r"pageable host memory.*pin_memory"), guard:
        target.copy_(host, non_blocking=True)
    with pytest.raises(RecordingRefused, match=r"host number.*fill_\(\)"), guard:
        target.copy_(torch.tensor(3.0))
    with pytest.raises(RecordingRefused, match="makes a copy on meta"), guard:
        host.to("meta")
    with pytest.raises(RecordingRefused, match="mixes tensors of two devices"), guard:
        torch.index_select(target, 0, torch.tensor([0, 1]))


def test_host_tensors_are_the_hosts_business_where_the_device_is_another() -> None:
    host = torch.tensor([3.0, 4.0])
    with RecordGuard(torch.device("meta")):
        assert host.tolist() == [3.0, 4.0]
        assert host[0].item() == 3.0


def test_work_outside_of_the_recorded_stream_is_refused() -> None:
    x = torch.ones(4)
    elsewhere = RecordGuard(x.device, still_recording=lambda: False)
    with pytest.raises(RecordingRefused, match="a stream that is not recorded"), elsewhere:
        x.add(1)


def test_a_guard_leaves_no_trace_and_looks_at_its_own_thread_only() -> None:
    originals = (torch.cuda.synchronize, torch.cuda.Event.query, torch.cuda.Stream.synchronize)
    x = torch.ones(4)
    seen: list[object] = []

    def elsewhere() -> None:
        seen.append(x.tolist())
        with RecordGuard(x.device), pytest.raises(RecordingRefused):
            torch.cuda.synchronize()
        with pytest.raises((AttributeError, TypeError)):  # the real one, which requires an event
            _unbound(torch.cuda.Event, "query")
        seen.append("not refused")

    with RecordGuard(x.device):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        with pytest.raises(RecordingRefused):
            torch.cuda.synchronize()
    assert seen == [[1.0] * 4, "not refused"]
    assert (torch.cuda.synchronize, torch.cuda.Event.query, torch.cuda.Stream.synchronize) == originals
    assert x.tolist() == [1.0] * 4


def test_a_lifted_guard_lets_everything_pass_and_comes_back() -> None:
    x = torch.ones(4)
    guard = RecordGuard(x.device)
    with guard:
        with guard.lifted():
            assert x.tolist() == [1.0] * 4
            assert x[0].item() == 1.0
        with pytest.raises(RecordingRefused):
            x.tolist()


def test_a_recorder_refuses_and_can_be_used_again(lab: Lab) -> None:
    x = torch.arange(4.0, device=lab.device)
    runs: list[int] = []

    def reads_from_its_second_run_on() -> Tensor:
        runs.append(1)
        return x + (x[0].item() if len(runs) > 1 else 0)

    with pytest.raises(RecordingRefused, match="item"):
        lab.recorder.record(reads_from_its_second_run_on)
    recording, out = lab.recorder.record(lambda: x + 1)
    recording.replay()
    assert out.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_an_interrupt_at_any_line_of_entering_leaves_no_guard_in_force() -> None:
    """A guard that stayed would refuse every later step of the thread as if it were recorded."""
    x, number = torch.ones(2), 1
    while interrupted_at(number, (guard := RecordGuard(x.device)).__enter__):
        assert x.tolist() == [1.0, 1.0]
        number += 1
    assert number > 10
    with pytest.raises(RecordingRefused):  # the last one was not interrupted
        x.tolist()
    guard.__exit__()
    assert x.tolist() == [1.0, 1.0]
