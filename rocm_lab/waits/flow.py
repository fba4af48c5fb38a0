"""The dataflow: for each instruction, what may be in flight when it is issued, over all paths.

An operation in flight has an age: for a queue of memory the operations that joined it later, for a hazard the wait
states since. Where paths meet, the smaller age counts, because a wait proves what is old enough. Ages are bounded, so
that the search for a fixed point ends.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from rocm_lab.simulator.assembly import Assembly
from rocm_lab.waits.counters import CAPACITY, Queue, Wait, queue_of, wait_of
from rocm_lab.waits.effects import Unit
from rocm_lab.waits.graph import blocks_of
from rocm_lab.waits.hazards import OF_MATRICES, ROWS, Facts, Hazard
from rocm_lab.waits.places import Places
from rocm_lab.waits.registers import VECTORS


class Flight(Enum):
    """The kinds of operations of memory in flight.

    LOAD:     registers are not written yet
    STORE:    LDS is not written yet
    TO_LDS:   LDS is not written yet, by a load into it
    LATE:     the same, and other waves have passed a barrier that did not wait for it
    ARRIVED:  LDS is written, by a load that was late: only a further barrier shows it to other waves
    """

    LOAD = "is loaded"
    STORE = "is stored to LDS"
    TO_LDS = "is loaded into LDS"
    LATE = "is loaded into LDS, across a barrier"
    ARRIVED = "arrived in LDS after the barrier"


class Key(NamedTuple):
    """One operation in flight: the instruction that began it, and its kind or its row of hazards."""

    begins: int
    kind: Flight | Hazard


class Aged(NamedTuple):
    """The age of an operation, and the registers that are concerned."""

    age: int
    registers: int


State = dict[Key, Aged]


class Node:
    """Everything about one instruction that the flow needs."""

    def __init__(self, index: int, facts: Facts) -> None:
        effects = facts.effects
        self.facts = facts
        self.wait: Wait = wait_of(facts.instruction)
        self.queue: Queue | None = queue_of(effects)
        self.is_barrier = facts.name == "s_barrier"
        self.reads_lds = effects.unit is Unit.LOCAL_MEMORY and facts.name.startswith("ds_read")
        self.begun: list[tuple[Key, int]] = [
            (Key(index, row), registers) for row in ROWS if (registers := row.first(facts))
        ]
        self.concerned = {row: registers for row in ROWS if (registers := row.second(facts))}
        self.joined: tuple[Key, int] | None = None
        if self.queue is not None:
            if effects.to_lds:
                self.joined = Key(index, Flight.TO_LDS), 0
            elif effects.writes:
                self.joined = Key(index, Flight.LOAD), effects.writes
            elif effects.stores and self.queue is Queue.LOCAL_MEMORY:
                self.joined = Key(index, Flight.STORE), 0


@dataclass(frozen=True, slots=True)
class Conflict:
    """An instruction that uses what an operation still has in flight."""

    key: Key
    user: int
    registers: int
    states: int = 0


class Flow:
    """The flow through one kernel."""

    def __init__(self, assembly: Assembly, arch: str) -> None:
        """Raises UnknownInstruction."""
        self.blocks = blocks_of(assembly)
        self.nodes = {
            index: Node(index, Facts.of(assembly.instructions[index], arch))
            for block in self.blocks.values()
            for index in range(block.first, block.last)
        }
        self._has_barriers = any(node.is_barrier for node in self.nodes.values())
        effects = {index: node.facts.effects for index, node in self.nodes.items()}
        self._places = Places(assembly.instructions, effects, self.blocks)

    def conflicts(self) -> list[Conflict]:
        """All conflicts on all paths, each pair of instructions once."""
        found: list[Conflict] = []
        for first, state in self._entry_states().items():
            for index in range(first, self.blocks[first].last):
                found += self._conflicts_at(index, state)
                state = self.step(index, state)
        return found

    def _entry_states(self) -> dict[int, State]:
        """The state before each block that can be reached."""
        entries: dict[int, State] = {0: {}}
        waiting = [0]
        while waiting:
            first = waiting.pop()
            after = entries[first]
            for index in range(first, self.blocks[first].last):
                after = self.step(index, after)
            for follower in self.blocks[first].followers:
                joined = _join(entries[follower], after) if follower in entries else after
                if follower not in entries or joined != entries[follower]:
                    entries[follower] = joined
                    waiting.append(follower)
        return entries

    def _conflicts_at(self, index: int, state: State) -> Iterator[Conflict]:
        for key, aged in state.items():
            conflict = self.conflict(index, key, aged)
            if conflict is not None:
                yield conflict

    def conflict(self, index: int, key: Key, aged: Aged) -> Conflict | None:
        """The conflict of an instruction with one operation in flight, if there is one."""
        node = self.nodes[index]
        if isinstance(key.kind, Hazard):
            shared = aged.registers & node.concerned.get(key.kind, 0)
            if shared:
                states = key.kind.states(self.nodes[key.begins].facts, node.facts)
                if aged.age < states:
                    return Conflict(key, index, shared, states - aged.age)
            return None
        if key.kind is Flight.LOAD:
            effects = node.facts.effects
            # A later load of vector memory writes its registers later.
            in_order = node.queue is self.nodes[key.begins].queue is Queue.VECTOR_MEMORY
            shared = aged.registers & (effects.reads | (0 if in_order else effects.writes))
            return Conflict(key, index, shared) if shared else None
        if key.kind is Flight.STORE:
            return Conflict(key, index, 0) if node.is_barrier else None
        is_looked_at = node.reads_lds and (key.kind is not Flight.TO_LDS or not self._has_barriers)
        return Conflict(key, index, 0) if is_looked_at and self._places.may_meet(index, key.begins) else None

    def step(self, index: int, state: State) -> State:
        """The state after an instruction."""
        node = self.nodes[index]
        after: State = {}
        overwritten = node.facts.effects.writes & VECTORS if node.facts.of_unit(Unit.MATRIX) else 0
        for key, aged in state.items():
            kind = key.kind
            if isinstance(kind, Hazard):
                age = aged.age + node.facts.states
                # The later matrix instruction is the one to wait for: hardware kept the two in order.
                registers = aged.registers & ~overwritten if kind in OF_MATRICES else aged.registers
                if age < kind.most and registers:
                    after[key] = Aged(age, registers)
            else:
                self._keep(node, key, aged, after)
        if node.joined is not None:
            key, registers = node.joined
            after[key] = Aged(0, registers)
        for key, registers in node.begun:
            after[key] = Aged(0, registers)
        return after

    def _keep(self, node: Node, key: Key, aged: Aged, after: State) -> None:
        """Adds an operation of memory to the state after an instruction, if it is still in flight."""
        if key.kind is Flight.ARRIVED:
            if not node.is_barrier:
                after[key] = aged
            return
        queue = self.nodes[key.begins].queue
        assert queue is not None
        capacity = CAPACITY[queue]
        age = aged.age + (node.queue is queue)
        left = node.wait.left(queue)
        if (left is not None and age >= left) or (capacity is not None and age >= capacity):
            if key.kind is Flight.LATE:
                after[Key(key.begins, Flight.ARRIVED)] = Aged(0, 0)
        elif node.is_barrier and key.kind is Flight.TO_LDS:
            _add(after, Key(key.begins, Flight.LATE), Aged(age, 0))
        else:
            _add(after, key, Aged(age, aged.registers))


def _add(state: State, key: Key, aged: Aged) -> None:
    state[key] = _meet(state[key], aged) if key in state else aged


def _meet(a: Aged, b: Aged) -> Aged:
    return a if a == b else Aged(min(a.age, b.age), a.registers | b.registers)


def _join(a: Mapping[Key, Aged], b: Mapping[Key, Aged]) -> State:
    joined = dict(a)
    for key, aged in b.items():
        _add(joined, key, aged)
    return joined
