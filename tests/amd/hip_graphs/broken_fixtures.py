"""Functions that a recording gets wrong, each next to a sound one of the same purpose.

A scenario is made on a device. step() is recorded; change() is the host's action between two replays; wanted() is the
right result of step() after it, computed without step(), and stale() the result of a recording that has frozen too
much. Recorders that freeze the same things agree on stale().
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from rocm_attn.kernels.launch import launch

SIZE = 8


class Scenario(ABC):
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.x = self.numbers(seed=1)

    def numbers(self, seed: int, size: int = SIZE) -> Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(self.device)

    @abstractmethod
    def step(self) -> Tensor: ...

    @abstractmethod
    def change(self) -> None: ...

    @abstractmethod
    def wanted(self) -> Tensor: ...


class Broken(Scenario):
    @abstractmethod
    def stale(self) -> Tensor: ...


class _FillKernel:
    """Computes out[:n] = x[:n], the rest 0; n is a launch argument (a number) or the address of one (a tensor)."""

    def __getitem__(self, grid: tuple[int, ...]) -> _FillKernel:
        return self

    def __call__(self, x: Tensor, out: Tensor, n: int | Tensor, **options: object) -> None:
        places = torch.arange(len(x), device=x.device)
        out.copy_(torch.where(places < n, x, torch.zeros_like(x)))


class LaunchNumberBaked(Broken):
    """Passes a count to a launch as a number."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.count = 3
        self.out = torch.zeros_like(self.x)

    def step(self) -> Tensor:
        launch(_FillKernel(), (1,), self.x, self.out, self.count)
        return self.out + 0

    def change(self) -> None:
        self.count = 6

    def wanted(self) -> Tensor:
        return torch.cat((self.x[:6], torch.zeros_like(self.x[6:])))

    def stale(self) -> Tensor:
        return torch.cat((self.x[:3], torch.zeros_like(self.x[3:])))


class LaunchNumberOnDevice(Scenario):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.count = torch.tensor(3, device=device)
        self.out = torch.zeros_like(self.x)

    def step(self) -> Tensor:
        launch(_FillKernel(), (1,), self.x, self.out, self.count)
        return self.out + 0

    def change(self) -> None:
        self.count.fill_(6)

    def wanted(self) -> Tensor:
        return torch.cat((self.x[:6], torch.zeros_like(self.x[6:])))


class FloatScaleChangedOnHost(Broken):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.scale = 0.5

    def step(self) -> Tensor:
        return self.x * self.scale

    def change(self) -> None:
        self.scale = 2.0

    def wanted(self) -> Tensor:
        return self.x * 2.0

    def stale(self) -> Tensor:
        return self.x * 0.5


class ScaleOnDevice(Scenario):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.scale = torch.full((1,), 0.5, device=device)

    def step(self) -> Tensor:
        return self.x * self.scale

    def change(self) -> None:
        self.scale.fill_(2.0)

    def wanted(self) -> Tensor:
        return self.x * 2.0


class BufferReallocated(Broken):
    """Writers reach the buffer by its owner, which has a larger one by then; the recording reads the old one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.buffer = self.numbers(seed=2)
        self.outgrown: list[Tensor] = []

    def step(self) -> Tensor:
        return self.x + self.buffer[:SIZE]

    def change(self) -> None:
        self.outgrown.append(self.buffer)
        self.buffer = self.numbers(seed=3, size=2 * SIZE)

    def wanted(self) -> Tensor:
        return self.x + self.numbers(seed=3, size=2 * SIZE)[:SIZE]

    def stale(self) -> Tensor:
        return self.x + self.numbers(seed=2)


class BufferOfFullSize(Scenario):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.buffer = torch.zeros(2 * SIZE, device=device)
        self.buffer[:SIZE].copy_(self.numbers(seed=2))

    def step(self) -> Tensor:
        return self.x + self.buffer[:SIZE]

    def change(self) -> None:
        self.buffer.copy_(self.numbers(seed=3, size=2 * SIZE))

    def wanted(self) -> Tensor:
        return self.x + self.numbers(seed=3, size=2 * SIZE)[:SIZE]


class HostBranchOnLength(Broken):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.length = 2

    def step(self) -> Tensor:
        return self.x.flip(0) if self.length > SIZE // 2 else self.x.clone()

    def change(self) -> None:
        self.length = SIZE

    def wanted(self) -> Tensor:
        return self.x.flip(0)

    def stale(self) -> Tensor:
        return self.x


class DeviceBranchOnLength(Scenario):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.length = torch.full((1,), 2, device=device)

    def step(self) -> Tensor:
        return torch.where(self.length > SIZE // 2, self.x.flip(0), self.x)

    def change(self) -> None:
        self.length.fill_(SIZE)

    def wanted(self) -> Tensor:
        return self.x.flip(0)


class InputReplaced(Broken):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.replaced: list[Tensor] = []

    def step(self) -> Tensor:
        return self.x.square()

    def change(self) -> None:
        self.replaced.append(self.x)
        self.x = self.numbers(seed=4)

    def wanted(self) -> Tensor:
        return self.numbers(seed=4).square()

    def stale(self) -> Tensor:
        return self.numbers(seed=1).square()


class InputCopiedInto(Scenario):
    def step(self) -> Tensor:
        return self.x.square()

    def change(self) -> None:
        self.x.copy_(self.numbers(seed=4))

    def wanted(self) -> Tensor:
        return self.numbers(seed=4).square()


class _Plans(Scenario):
    """A plan that reads evenly spaced starts, cuts them to the live lengths on the device, and reads them next time.

    starts: int64 [SIZE + 1], made once: 0, 10, 20 ...
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.places = torch.arange(SIZE + 1, device=device)
        self.starts = self.places * 10
        self.capacity = torch.zeros(1, dtype=torch.int64, device=device)
        self.length = torch.zeros(1, dtype=torch.int64, device=device)
        self.plan(length=4)

    def plan(self, length: int) -> None:
        self.length.fill_(length)
        self.capacity.copy_(self.starts[-1:])

    def change(self) -> None:
        self.plan(length=5)

    def share(self, starts: Tensor) -> Tensor:
        starts.copy_(self.places * self.length)
        return starts / self.capacity

    def wanted(self) -> Tensor:
        return self.places * 5 / torch.full((1,), SIZE * 10, device=self.device)


class RecordedWorkWritesWhatThePlanReads(_Plans, Broken):
    """Writes the live starts to the buffer that the next plan reads as the evenly spaced ones."""

    def step(self) -> Tensor:
        return self.share(self.starts)

    def stale(self) -> Tensor:
        return self.places * 5 / torch.full((1,), SIZE * 4, device=self.device)


class RecordedWorkHasItsOwnStarts(_Plans):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.live_starts = torch.zeros_like(self.starts)

    def step(self) -> Tensor:
        return self.share(self.live_starts)


class _Ring:
    """A buffer that its users see through a window, and that grows by moving."""

    def __init__(self, values: Tensor) -> None:
        self.buffer = values
        self.outgrown: list[Tensor] = []

    def window(self) -> Tensor:
        return self.buffer[2:6]

    def grow(self) -> None:
        self.outgrown.append(self.buffer)
        self.buffer = torch.cat((self.buffer, torch.zeros_like(self.buffer)))


class ViewOfRegrownBuffer(Broken):
    """Writes through the new window, which never reach the recording: its window shows the old buffer."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.ring = _Ring(self.numbers(seed=5))

    def step(self) -> Tensor:
        return self.ring.window() * 3

    def change(self) -> None:
        self.ring.grow()
        self.ring.window().copy_(self.numbers(seed=6)[:4])

    def wanted(self) -> Tensor:
        return self.numbers(seed=6)[:4] * 3

    def stale(self) -> Tensor:
        return self.numbers(seed=5)[2:6] * 3


class ViewOfBufferThatStays(Scenario):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.ring = _Ring(self.numbers(seed=5))

    def step(self) -> Tensor:
        return self.ring.window() * 3

    def change(self) -> None:
        self.ring.window().copy_(self.numbers(seed=6)[:4])

    def wanted(self) -> Tensor:
        return self.numbers(seed=6)[:4] * 3


BROKEN_AND_SOUND: tuple[tuple[Any, type[Scenario]], ...] = (
    (LaunchNumberBaked, LaunchNumberOnDevice),
    (FloatScaleChangedOnHost, ScaleOnDevice),
    (BufferReallocated, BufferOfFullSize),
    (HostBranchOnLength, DeviceBranchOnLength),
    (InputReplaced, InputCopiedInto),
    (RecordedWorkWritesWhatThePlanReads, RecordedWorkHasItsOwnStarts),
    (ViewOfRegrownBuffer, ViewOfBufferThatStays),
)
