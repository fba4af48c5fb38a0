"""Issues the loops of a SIMD's waves, clock by clock, by the rules of rates.py.

Each wave has a next instruction, and the one that can issue first does: its unit is free, the data that an s_waitcnt
waits for have returned, the waves of a barrier have come. Equal ones go by s_setprio, and then the wave that
has waited longest. All four SIMDs of a CU do the same, so that each has a quarter of LDS and of vector memory.

Not known here: conflicts of LDS banks, misses of caches, fetches of instructions, register ports, clocks under load.
"""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rocm_lab.cycles import rates
from rocm_lab.cycles.rates import RATES, Kind, kind_of, vector_clocks
from rocm_lab.simulator.assembly import Instruction
from rocm_lab.waits.counters import Queue, queue_of, wait_of
from rocm_lab.waits.effects import Unit
from rocm_lab.waits.hazards import Facts

# Bytes of a lane that an access of LDS moves, as in ds_read2st64_b64; of exchanges between lanes, one word.
_LDS_ACCESS = re.compile(r"ds_(?:read|write)(2?)(?:st64)?_[biu](\d+)")
_LOAD = re.compile(r"(?:buffer|global)_(?:load|store|atomic)_(?:lds_)?(?:dword(?:x(\d))?|\w+)")
_WORD = 4


@dataclass(frozen=True, slots=True)
class Slot:
    """An instruction of the loop as the units see it.

    unit:     which issues it
    matrix:   clocks of the matrix unit
    vector:   its kind, of vector instructions
    busy:     clocks until the unit takes another instruction
    own:      clocks until its wave issues again, at the least
    service:  clocks for which it keeps LDS or vector memory busy
    queue:    the counter that it joins
    left:     of an s_waitcnt, (queue, operations that may be in flight after it)
    """

    name: str
    unit: Unit
    matrix: int = 0
    vector: Kind = Kind.PLAIN
    busy: int = rates.STEP
    own: int = rates.STEP
    service: int = 0
    queue: Queue | None = None
    left: tuple[tuple[Queue, int], ...] = ()
    priority: int | None = None


def slots_of(body: Sequence[Instruction], arch: str) -> list[Slot]:
    """The instructions of an iteration. Raises UnknownInstruction."""
    return [_slot(each, arch, is_back=each is body[-1]) for each in body]


def _slot(instruction: Instruction, arch: str, *, is_back: bool) -> Slot:
    facts = Facts.of(instruction, arch)
    name, unit = instruction.name, facts.effects.unit
    if unit is Unit.MATRIX:
        clocks = facts.passes * rates.PASS
        return Slot(name, unit, matrix=clocks, busy=min(clocks, rates.MATRIX_READ))
    if unit is Unit.VECTOR:
        kind = kind_of(name)
        return Slot(name, unit, vector=kind, busy=vector_clocks(kind, arch))
    if unit in (Unit.LOCAL_MEMORY, Unit.VECTOR_MEMORY):
        return Slot(name, unit, service=_service(instruction, unit, arch), queue=queue_of(facts.effects))
    if unit is Unit.SCALAR_MEMORY:
        return Slot(name, unit, queue=Queue.SCALAR_MEMORY)
    if name == "s_nop":
        return Slot(name, unit, own=facts.states * rates.WAIT_STATE)
    if name == "s_setprio":
        return Slot(name, unit, priority=instruction.count)
    if name == "s_waitcnt":
        wait = wait_of(instruction)
        return Slot(name, unit, left=tuple((q, left) for q in Queue if (left := wait.left(q)) is not None))
    # The branch back is taken; others within an iteration count as not taken.
    is_taken = is_back and name.startswith(("s_branch", "s_cbranch_"))
    return Slot(name, unit, own=rates.BRANCH if is_taken else rates.STEP)


def _service(instruction: Instruction, unit: Unit, arch: str) -> int:
    """Clocks of a SIMD's quarter of LDS or of vector memory."""
    rate = rates.VECTOR_MEMORY
    if unit is Unit.LOCAL_MEMORY:
        rate = RATES[arch].lds_write if "_write" in instruction.name else RATES[arch].lds_read
    return -(-lane_bytes(instruction.name) * rates.LANES * rates.SIMDS // rate)


def lane_bytes(name: str) -> int:
    """Bytes that a memory instruction moves for a lane; a word for elements of less and for exchanges of lanes."""
    local, vector = _LDS_ACCESS.match(name), _LOAD.match(name)
    if local:
        return int(local[2]) // 8 * (2 if local[1] else 1)
    return _WORD * int((vector and vector[1]) or 1)


@dataclass(slots=True, eq=False)
class _Wave:
    """A wave: its program, its loop and place there, and what it has in flight."""

    program: int
    slots: Sequence[Slot]
    at: int = 0
    free: int = 0
    last: int = 0
    iterations: int = 0
    arrived: int | None = None
    barriers: int = 0
    priority: int = 0
    flights: dict[Queue, deque[int]] = field(default_factory=lambda: {queue: deque() for queue in Queue})


@dataclass(slots=True)
class Simd:
    """A SIMD whose waves run the same loop, or halves of a program's waves two.

    slots:      an iteration
    programs:   program of each wave; waves of one program share its barriers
    staggered:  true if the second half of a program's waves runs one barrier later
    latency:    clocks of a load from memory
    second:     an iteration of that half, if it runs another loop
    priority:   by how much that half's s_setprio is above the first one's
    """

    slots: Sequence[Slot]
    programs: Sequence[int]
    staggered: bool
    latency: int = rates.MEMORY_LATENCY
    second: Sequence[Slot] | None = None
    priority: int = 0
    _units: dict[Unit, int] = field(default_factory=lambda: dict.fromkeys(Unit, 0))
    _matrix_free: int = 0
    _lds: deque[int] = field(default_factory=deque)
    _served: dict[Unit, int] = field(default_factory=lambda: dict.fromkeys(Unit, 0))
    _came: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def clocks(self, iterations: int) -> float:
        """Clocks between iterations in a steady state, from the second half of them."""
        waves = [_Wave(program, self.slots, free=place * rates.STEP) for place, program in enumerate(self.programs)]
        for wave in self._second_half(waves):
            wave.slots, wave.priority = self.second or self.slots, self.priority
            if self.staggered:
                # It waits for the first barrier of the others before it begins.
                self._came.setdefault((wave.program, 0), []).append(0)
                wave.barriers, wave.arrived = 1, 0
        ends: list[list[int]] = [[] for _ in waves]
        while any(len(end) < iterations for end in ends):
            when, wave = min(
                ((self._earliest(wave), wave) for wave in waves),
                key=lambda each: (each[0], -each[1].priority, each[1].last),
            )
            assert when < _NEVER, "waves wait for each other for ever"
            if self._issue(wave, when):
                ends[waves.index(wave)].append(when)
        half = iterations // 2
        return max((end[iterations - 1] - end[half - 1]) / (iterations - half) for end in ends)

    def _second_half(self, waves: list[_Wave]) -> list[_Wave]:
        own = {program: [wave for wave in waves if wave.program == program] for program in set(self.programs)}
        return [wave for group in own.values() for wave in group[(len(group) + 1) // 2 :]]

    def _earliest(self, wave: _Wave) -> int:
        """The clock at which a wave's next instruction can issue."""
        slot, when = wave.slots[wave.at], wave.free
        if wave.arrived is not None:
            came = self._came[wave.program, wave.arrived]
            if len(came) < self.programs.count(wave.program):
                return _NEVER
            when = max(when, max(came) + rates.BARRIER)
        if slot.unit is not Unit.CONTROL:
            when = max(when, self._units[_PORTS.get(slot.unit, slot.unit)])
        if slot.unit is Unit.MATRIX:
            when = max(when, self._matrix_free)
        if slot.vector is Kind.PACKED and self._matrix_free:
            when = max(when, self._matrix_free + rates.PACKED_AFTER_MATRIX)
        if slot.unit is Unit.LOCAL_MEMORY and len(self._lds) >= rates.LDS_QUEUE:
            when = max(when, self._lds[-rates.LDS_QUEUE])
        for queue, left in slot.left:
            flight = wave.flights[queue]
            if len(flight) > left:
                when = max(when, flight[len(flight) - 1 - left])
        return when

    def _issue(self, wave: _Wave, when: int) -> bool:
        """Issues a wave's next instruction; returns true if it ends an iteration."""
        slot = wave.slots[wave.at]
        wave.arrived = None
        wave.last, wave.free = when, when + slot.own
        if slot.unit is not Unit.CONTROL:
            self._units[_PORTS.get(slot.unit, slot.unit)] = when + slot.busy
        if slot.matrix:
            self._matrix_free = when + slot.matrix
        if slot.queue is not None:
            wave.flights[slot.queue].append(self._returns(slot, when, wave))
        if slot.priority is not None:
            wave.priority = slot.priority
        if slot.name == "s_barrier":
            self._came.setdefault((wave.program, wave.barriers), []).append(when)
            wave.arrived, wave.barriers = wave.barriers, wave.barriers + 1
        wave.at = (wave.at + 1) % len(wave.slots)
        return wave.at == 0

    def _returns(self, slot: Slot, when: int, wave: _Wave) -> int:
        """The clock at which the data of a memory operation have come."""
        assert slot.queue is not None
        if slot.unit is Unit.SCALAR_MEMORY:
            return when + rates.SCALAR_LATENCY
        begins = max(when, self._served[slot.unit])
        self._served[slot.unit] = begins + slot.service
        if slot.unit is Unit.LOCAL_MEMORY:
            self._lds.append(begins + slot.service)
            return begins + max(rates.LDS_LATENCY, slot.service)
        flight = wave.flights[slot.queue]
        return max(begins + slot.service + self.latency, flight[-1] if flight else 0)


# Matrix and vector instructions issue through one port; so do LDS and vector memory (fav4, 1).
_PORTS = {Unit.MATRIX: Unit.VECTOR, Unit.LOCAL_MEMORY: Unit.VECTOR_MEMORY}
_NEVER = 1 << 62
