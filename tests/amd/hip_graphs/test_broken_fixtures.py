"""Errors of a real recording are errors of the fake one too, with equal results; the sound twins are right on both."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.launch import launch
from tests.amd.hip_graphs.recorders import Lab

SIZE = 8


class Scenario(ABC):
    """is_sound: true if step() reads on the device what change() writes there"""

    def __init__(self, device: torch.device, *, is_sound: bool) -> None:
        self.device, self.is_sound = device, is_sound
        self.x = self.numbers(seed=1)
        self.dropped: list[Tensor] = []  # memory that was replaced keeps its address

    def numbers(self, seed: int, size: int = SIZE) -> Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(self.device)

    def on_device(self, number: float) -> Tensor:
        return torch.full((1,), number, device=self.device)

    @abstractmethod
    def step(self) -> Tensor: ...

    @abstractmethod
    def change(self) -> None: ...

    def stale(self, before: Tensor) -> Tensor:
        """The broken function's result after change(). before: the one before it"""
        return before


class HostValue(Scenario):
    """Reads a number that the host keeps; the sound twin has it in a tensor."""

    before, after = 0.5, 2.0

    def __init__(self, device: torch.device, *, is_sound: bool) -> None:
        super().__init__(device, is_sound=is_sound)
        self.value: float | Tensor = self.on_device(self.before) if is_sound else self.before

    def change(self) -> None:
        if isinstance(self.value, Tensor):
            self.value.fill_(self.after)
        else:
            self.value = self.after

    def step(self) -> Tensor:
        return self.x * self.value


class _FillKernel:
    """Computes out[:n] = x[:n], the rest 0; n is a launch argument (a number) or the address of one (a tensor)."""

    def __getitem__(self, grid: tuple[int, ...]) -> _FillKernel:
        return self

    def __call__(self, x: Tensor, out: Tensor, n: float | Tensor, **options: object) -> None:
        places = torch.arange(len(x), device=x.device)
        out.copy_(torch.where(places < n, x, torch.zeros_like(x)))


class NumberOfALaunch(HostValue):
    before, after = 3, 6

    def step(self) -> Tensor:
        out = torch.zeros_like(self.x)
        launch(_FillKernel(), (1,), self.x, out, self.value)
        return out + 0


class BranchOnALength(HostValue):
    before, after = 2, SIZE

    def step(self) -> Tensor:
        if isinstance(self.value, Tensor):
            return torch.where(self.value > SIZE // 2, self.x.flip(0), self.x)
        return self.x.flip(0) if self.value > SIZE // 2 else self.x.clone()


class BufferThatGrows(Scenario):
    """Writers reach the buffer by its owner, which has a larger one by then; the sound twin's had the full size."""

    def __init__(self, device: torch.device, *, is_sound: bool) -> None:
        super().__init__(device, is_sound=is_sound)
        self.buffer = torch.cat((self.numbers(seed=2), torch.zeros(SIZE * is_sound, device=device)))

    def step(self) -> Tensor:
        return self.x + self.buffer[:SIZE]

    def change(self) -> None:
        if self.is_sound:
            self.buffer.copy_(self.numbers(seed=3, size=2 * SIZE))
        else:
            self.dropped.append(self.buffer)
            self.buffer = self.numbers(seed=3, size=2 * SIZE)


class InputThatIsReplaced(Scenario):
    """The sound twin copies into it."""

    def step(self) -> Tensor:
        return self.x.square()

    def change(self) -> None:
        if self.is_sound:
            self.x.copy_(self.numbers(seed=4))
        else:
            self.dropped.append(self.x)
            self.x = self.numbers(seed=4)


class RecordedWorkWritesWhatThePlanReads(Scenario):
    """A plan reads evenly spaced starts, cuts them to the live lengths on the device, and reads them next time.

    Recorded work writes the live starts to the buffer that the next plan reads; the sound twin's has its own.
    starts: int64 [SIZE + 1], made once: 0, 10, 20 ...
    """

    def __init__(self, device: torch.device, *, is_sound: bool) -> None:
        super().__init__(device, is_sound=is_sound)
        self.places = torch.arange(SIZE + 1, device=device)
        self.starts = self.places * 10
        self.live_starts = torch.zeros_like(self.starts) if is_sound else self.starts
        self.capacity, self.length = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self.plan(length=4)

    def plan(self, length: int) -> None:
        self.length.fill_(length)
        self.capacity.copy_(self.starts[-1:])

    def step(self) -> Tensor:
        self.live_starts.copy_(self.places * self.length)
        return self.live_starts / self.capacity

    def change(self) -> None:
        self.plan(length=5)

    def stale(self, before: Tensor) -> Tensor:
        return self.places * 5 / self.on_device(SIZE * 4)


class ViewOfABufferThatGrows(Scenario):
    """Writes through the owner's new window, which never reach the recording: its window shows the old buffer."""

    def __init__(self, device: torch.device, *, is_sound: bool) -> None:
        super().__init__(device, is_sound=is_sound)
        self.buffer = self.numbers(seed=5)

    def step(self) -> Tensor:
        return self.buffer[2:6] * 3

    def change(self) -> None:
        if not self.is_sound:
            self.dropped.append(self.buffer)
            self.buffer = torch.cat((self.buffer, torch.zeros_like(self.buffer)))
        self.buffer[2:6].copy_(self.numbers(seed=6)[:4])


SCENARIOS: tuple[type[Scenario], ...] = (
    HostValue,
    NumberOfALaunch,
    BranchOnALength,
    BufferThatGrows,
    InputThatIsReplaced,
    RecordedWorkWritesWhatThePlanReads,
    ViewOfABufferThatGrows,
)


@pytest.mark.parametrize("is_sound", [False, True], ids=["broken", "sound"])
@pytest.mark.parametrize("kind", SCENARIOS, ids=lambda kind: kind.__name__)
def test_a_broken_function_replays_the_stale_answer_and_its_sound_twin_the_right_one(
    lab: Lab, kind: type[Scenario], is_sound: bool
) -> None:
    scenario, sound = kind(lab.device, is_sound=is_sound), kind(lab.device, is_sound=True)
    recording, out = lab.recorder.record(scenario.step)
    recording.replay()
    stale = scenario.stale(sound.step())
    scenario.change()
    sound.change()
    recording.replay()
    right = sound.step()
    assert not torch.equal(right, stale)  # only the change makes a difference
    assert torch.equal(out, right if is_sound else stale)
