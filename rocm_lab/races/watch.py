"""Finds races in simulated launches, under orders of programs and turns of waves that a seed chooses.

    with watched(RaceWatch(seed=0)) as watch, simulated("gfx942"):
        launch_store_kv(...)
    assert not watch.races

In LDS two waves race if both access a byte between the same two barriers and one of them stores to it. An access is in
all intervals from its issue to the wait that proves it complete, since LDS has several queues and waves of different
SIMDs may overtake each other (LLVM's memory model of gfx942). So a load into LDS that is still in flight at a barrier
races with the accesses after it, also with those of its own wave. In global memory two waves, of one program or of two,
race if they access a byte, one of them stores to it, and neither is before the other by barriers, releases and acquires
(clocks.py). Atomics do not race with each other. A load of the words that the wave compares and swaps next counts as
one, since an old value fails there: so compilers add to 16 bits. Two stores of the same value are no race: copies of a
tensor's element in several lanes are often stored by all of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from rocm_lab.races.accesses import Pair, Touch, pairs_of
from rocm_lab.races.clocks import NEVER, Clock, Operation, TimedWave, meet
from rocm_lab.simulator.arrays import Array
from rocm_lab.simulator.assembly import Assembly
from rocm_lab.simulator.core import Core, Wave
from rocm_lab.simulator.faults import NeverWritten
from rocm_lab.simulator.isa import local_memory
from rocm_lab.simulator.isa.control import CACHE_CONTROLS
from rocm_lab.simulator.isa.step import Step
from rocm_lab.simulator.lds import Lds
from rocm_lab.simulator.memory import Allocation, Memory
from rocm_lab.simulator.watch import TO_THE_BARRIER, Program, Turn, Watch
from rocm_lab.waits.counters import Queue, Wait, queue_of, wait_of
from rocm_lab.waits.effects import effects_of

# Instructions of a turn, at most.
_LONGEST_TURN = 64


@dataclass(frozen=True, slots=True)
class Party:
    """One of two that race: its instruction, by its number in the kernel and its text, and its wave and program."""

    index: int
    text: str
    wave: int
    program: Program
    is_store: bool

    def __str__(self) -> str:
        verb = "stores" if self.is_store else "loads"
        return f"wave {self.wave} of program {self.program} {verb} at {self.index}: {self.text!r}"


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses to a byte that are in no order, as they happened in this run.

    memory: "LDS", or the launch's name of a tensor
    byte:   in it
    """

    kernel: str
    memory: str
    byte: int
    first: Party
    second: Party

    def line(self) -> str:
        """One line for people."""
        return f"{self.kernel}, {self.memory}, byte {self.byte}: {self.first}; {self.second}"


class _WatchedMemory(Memory):
    def __init__(self, allocations: list[Allocation], touches: _Touches) -> None:
        super().__init__(allocations)
        self._touches = touches

    def load(self, addresses: Array, size: int) -> Array:
        self._touches.load(addresses, size)
        return super().load(addresses, size)

    def store(self, addresses: Array, values: Array) -> None:
        self._touches.store(addresses, values)
        super().store(addresses, values)


class _WatchedLds(Lds):
    def __init__(self, num_bytes: int, poison: int, touches: _Touches) -> None:
        super().__init__(num_bytes, poison)
        self._touches = touches

    def _note_load(self, offsets: Array, size: int, wave: int) -> None:
        self._touches.load(offsets, size)

    def _note_store(self, offsets: Array, values: Array, wave: int) -> None:
        self._touches.store(offsets, values)

    def _note_add(self, offsets: Array, values: Array, wave: int) -> None:
        self._touches.load(offsets, 4)
        self._touches.store(offsets, values[:, None].view(np.uint8))


@dataclass(slots=True)
class _Touches:
    """The touches of one memory by the operation that is executed now, and by those before it."""

    now: list[Touch] = field(default_factory=list)
    all: list[Touch] = field(default_factory=list)
    operation: Operation | None = None

    def load(self, where: Array, size: int) -> None:
        self._add(where, size, np.zeros((0, size), np.uint8))

    def store(self, where: Array, values: Array) -> None:
        self._add(where, values.shape[1], np.ascontiguousarray(values).copy())

    def forget(self) -> None:
        """Forgets the touches of the operation."""
        del self.all[len(self.all) - len(self.now) :]

    def _add(self, where: Array, size: int, values: Array) -> None:
        assert self.operation is not None, "an instruction accesses memory that joins no queue"
        touch = Touch(self.operation, where.copy(), size, values)
        self.now.append(touch)
        self.all.append(touch)


class RaceWatch(Watch):
    """Notes who loads and stores what. races: one for each pair of instructions of each kernel."""

    def __init__(self, *, seed: int) -> None:
        self.races: list[Race] = []
        self._random = random.Random(seed)
        self._found: set[tuple[str, int, int]] = set()
        self._time = 0
        self._memory, self._lds = _Touches(), _Touches()
        self._waves: list[TimedWave] = []
        self._words: dict[int, Clock] = {}
        self._num_ready = 0
        self._stuck: set[int] = set()

    def begin(self, assembly: Assembly, allocations: list[Allocation]) -> Memory:
        self._assembly = assembly
        self._allocations = allocations
        self._memory, self._words = _Touches(), {}
        return _WatchedMemory(allocations, self._memory)

    def programs(self, grid: Program) -> Iterable[Program]:
        programs = list(super().programs(grid))
        self._random.shuffle(programs)
        return programs

    def begin_program(self, program: Program, num_waves: int, lds_bytes: int, poison: int) -> Lds:
        self._waves = [TimedWave(program, number) for number in range(num_waves)]
        self._lds = _Touches()
        return _WatchedLds(lds_bytes, poison, self._lds)

    def turn(self, ready: Sequence[Wave]) -> Turn:
        self._num_ready = len(ready)
        if self._num_ready == 1:
            return Turn(ready[0], TO_THE_BARRIER)
        return Turn(self._random.choice(ready), self._random.randint(1, _LONGEST_TURN))

    def step(self, core: Core, index: int, step: Step) -> Step:
        instruction = self._assembly.instructions[index]
        if instruction.name == "s_waitcnt":
            return partial(self._wait, core, wait_of(instruction))
        if instruction.name in CACHE_CONTROLS:
            is_of_agent = "sc1" in instruction.text.split()
            return partial(self._control, core, instruction.name) if is_of_agent else step
        if instruction.name == "s_endpgm":
            return partial(self._end_wave, core, step)
        queue = queue_of(effects_of(instruction))
        if queue is None:
            return step
        name = instruction.name
        is_atomic = "_atomic_" in name or name in local_memory.ATOMICS or "sc1" in instruction.modifiers
        return partial(self._access, core, index, queue, is_atomic, step)

    def meet(self) -> None:
        self._settle_lds()
        meet(self._waves)
        self._lds.all[:] = [touch for touch in self._lds.all if touch.operation.until == NEVER]

    def _settle_lds(self) -> None:
        for pair in pairs_of(self._lds.all):
            first, second = pair.first.operation, pair.second.operation
            # A wave's own operations of one queue are in order.
            is_in_order = first.queue is second.queue or first.until <= second.time
            if first.wave is not second.wave or not is_in_order:
                self._note(pair, "LDS", pair.address)

    def end(self) -> None:
        self._settle_lds()
        for pair in pairs_of(self._memory.all):
            first, second = pair.first.operation, pair.second.operation
            if not first.is_before(second):
                allocation = self._allocation_at(pair.address)
                self._note(pair, allocation.name, pair.address - allocation.address)

    def _wait(self, core: Core, wait: Wait) -> None:
        self._time += 1
        self._waves[core.wave_number].wait(wait, self._time)

    def _control(self, core: Core, name: str) -> None:
        wave = self._waves[core.wave_number]
        if name == "buffer_wbl2":
            wave.write_back()
        else:
            wave.invalidate()

    def _end_wave(self, core: Core, step: Step) -> int | None:
        self._time += 1
        self._waves[core.wave_number].end(self._time)
        return step()

    def _access(self, core: Core, index: int, queue: Queue, is_atomic: bool, step: Step) -> int | None:
        self._time += 1
        wave = self._waves[core.wave_number]
        operation = Operation(wave, index, queue, is_atomic, self._time, wave.segment, wave.clock)
        for touches in (self._memory, self._lds):
            touches.operation = operation
            touches.now.clear()
        try:
            step()
        except NeverWritten:
            self._stuck.add(core.wave_number)
            if len(self._stuck) >= self._num_ready:
                raise
            # Another wave that has not come to the barrier may write it: a race, which is seen when it has.
            for touches in (self._memory, self._lds):
                touches.forget()
            return index
        self._stuck.clear()
        if "_cmpswap" in self._assembly.instructions[index].name:
            self._trust_load_before(wave)
        wave.issue(operation, self._clocks(is_atomic, is_store=False), self._clocks(is_atomic, is_store=True))
        return None

    def _trust_load_before(self, wave: TimedWave) -> None:
        """The wave's last load counts as atomic if it is of the words that the operation compares."""
        compared = {address for touch in self._memory.now if not touch.is_store for address in touch.where.tolist()}
        before = reversed(self._memory.all[: len(self._memory.all) - len(self._memory.now)])
        last = next((touch for touch in before if touch.operation.wave is wave), None)
        if last is not None and not last.is_store and set(last.where.tolist()) == compared:
            last.operation.is_atomic = True

    def _clocks(self, is_atomic: bool, *, is_store: bool) -> list[Clock]:
        """The clocks of the words that the last operation loads or stores, if it is atomic."""
        touches = [touch for touch in self._memory.now if is_atomic and touch.is_store == is_store]
        addresses = {address for touch in touches for address in touch.where.tolist()}
        return [self._words.setdefault(address, {}) for address in addresses]

    def _note(self, pair: Pair, memory: str, byte: int) -> None:
        first, second = pair.first, pair.second
        key = self._assembly.name, first.operation.index, second.operation.index
        if key not in self._found:
            self._found.add(key)
            self.races.append(Race(self._assembly.name, memory, byte, self._party(first), self._party(second)))

    def _party(self, touch: Touch) -> Party:
        operation = touch.operation
        text = self._assembly.instructions[operation.index].text
        return Party(operation.index, text, operation.wave.number, operation.wave.program, touch.is_store)

    def _allocation_at(self, address: int) -> Allocation:
        return next(each for each in self._allocations if 0 <= address - each.address < each.num_bytes)
