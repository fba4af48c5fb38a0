"""The order between streams, with stand-ins that only record."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from rocm_attn.machine import devices
from rocm_attn.machine.devices import StreamOrder, with_index


@dataclass
class Stream:
    handle: int
    log: list[str]

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.handle} waits for {other.handle}")


@dataclass
class Streams(devices.Streams):
    log: list[str] = field(default_factory=list)
    now: int = 0
    capturing: bool = False

    def current_handle(self) -> int:
        return self.now

    def current(self) -> Stream:
        return Stream(self.now, self.log)

    def is_capturing(self) -> bool:
        return self.capturing

    def take_log(self) -> list[str]:
        log, self.log[:] = list(self.log), []
        return log


def order() -> tuple[StreamOrder, Streams]:
    streams = Streams()
    return StreamOrder(torch.device("cuda", 0), streams), streams


def test_layers_on_another_stream_than_their_step_began_on_start_after_its_beginning() -> None:
    """They wait once per step; the next step starts after all of them."""
    streams_in_order, streams = order()
    streams_in_order.follow()
    for streams.now in (7, 7, 8, 0, 7):
        streams_in_order.join()
    assert streams.take_log() == ["7 waits for 0", "8 waits for 0"]
    streams.now = 0
    streams_in_order.follow()
    assert streams.take_log() == ["0 waits for 0", "0 waits for 7", "0 waits for 8"]
    streams_in_order.follow()
    assert streams.take_log() == []
    streams.now = 7
    streams_in_order.join()
    assert streams.take_log() == ["7 waits for 0"]


def test_a_capture_is_ordered_by_its_recorder() -> None:
    """A captured stream must not wait for one that is not captured."""
    streams_in_order, streams = order()
    streams_in_order.follow()
    streams.now, streams.capturing = 9, True
    streams_in_order.join()
    assert streams.take_log() == []
    streams.now, streams.capturing = 0, False
    streams_in_order.follow()
    assert streams.take_log() == []


def test_a_device_may_be_named() -> None:
    assert with_index("cpu") == with_index("cpu:0") == torch.device("cpu")


def test_memory_of_a_gpu_is_what_tensors_may_still_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that torch has and no tensor uses counts; that of other processes does not."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 250)
    assert devices.memory_of(torch.device("cuda", 0)) == 150
    assert devices.memory_of(torch.device("cpu")) > 1 << 30
