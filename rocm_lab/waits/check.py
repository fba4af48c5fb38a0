"""The verdict on a kernel's waits: proved, faults with their paths, or not checked and why."""

from collections import deque
from dataclasses import dataclass
from enum import Enum

from rocm_lab.simulator.assembly import Assembly
from rocm_lab.simulator.faults import UnknownInstruction
from rocm_lab.waits.flow import Aged, Conflict, Flight, Flow, Key, State
from rocm_lab.waits.graph import Block
from rocm_lab.waits.hazards import Hazard
from rocm_lab.waits.registers import text_of


class Word(Enum):
    """The verdict in a word."""

    PROVED = "proved"
    FAULT = "fault"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Fault:
    """A use of what is still in flight.

    begins:  the instruction that puts it in flight
    path:    the names of the blocks from there to the use, both included
    uses:    the instruction that uses it too early
    why:     what is wrong, as a sentence
    """

    begins: str
    path: tuple[str, ...]
    uses: str
    why: str

    def line(self) -> str:
        """One line for people."""
        return f"{self.begins!r} -> {' -> '.join(self.path)} -> {self.uses!r}: {self.why}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one kernel.

    faults:   at most one for each pair of instructions
    reasons:  why it was not checked, or not entirely; at most one for each load into LDS, which many reads may follow
    """

    kernel: str
    faults: tuple[Fault, ...]
    reasons: tuple[str, ...]

    @property
    def word(self) -> Word:
        """A fault counts before what could not be checked."""
        if self.faults:
            return Word.FAULT
        return Word.NOT_CHECKED if self.reasons else Word.PROVED


def check_waits(assembly: Assembly, arch: str) -> Verdict:
    """The verdict on the waits of one kernel for "gfx942" or "gfx950"."""
    try:
        flow = Flow(assembly, arch)
        found = flow.conflicts()
    except UnknownInstruction as unknown:
        return Verdict(assembly.name, (), (str(unknown),))
    faults, reasons = [], []
    loads = set[Key]()
    for conflict in found:
        is_unsure = conflict.key.kind in (Flight.TO_LDS, Flight.LATE, Flight.ARRIVED)
        if is_unsure and conflict.key in loads:
            continue
        begins, uses = (assembly.instructions[index].text for index in (conflict.key.begins, conflict.user))
        fault = Fault(begins, _path(flow, conflict), uses, _why(conflict))
        if is_unsure:
            loads.add(conflict.key)
            reasons.append(fault.line())
        else:
            faults.append(fault)
    return Verdict(assembly.name, tuple(faults), tuple(reasons))


def _why(conflict: Conflict) -> str:
    kind = conflict.key.kind
    registers = text_of(conflict.registers)
    if isinstance(kind, Hazard):
        return f"{kind.rule}: {registers} needs {conflict.states} more wait states"
    if kind is Flight.LOAD:
        return f"{registers} is not waited for"
    if kind is Flight.STORE:
        return "LDS is not waited for before the barrier that shows it to other waves"
    if kind is Flight.TO_LDS:
        return "LDS is read while a load into it is in flight; the places are not compared"
    return "LDS is read after a barrier that did not wait for the load into it; the places are not compared"


def _path(flow: Flow, conflict: Conflict) -> tuple[str, ...]:
    """The shortest list of blocks on which the operation reaches its use in flight."""
    begins = conflict.key.begins
    block = next(each for each in flow.blocks.values() if each.first <= begins < each.last)
    waiting: deque[tuple[Block, int, State, tuple[str, ...]]] = deque([(block, begins, {}, (block.name,))])
    seen: set[tuple[int, frozenset[tuple[Key, Aged]]]] = set()
    while waiting:
        block, first, state, path = waiting.popleft()
        for index in range(first, block.last):
            held = state.get(conflict.key)
            if index == conflict.user and held and flow.conflict(index, conflict.key, held):
                return path
            state = {key: aged for key, aged in flow.step(index, state).items() if key.begins == begins}
        for follower in block.followers:
            entry = follower, frozenset(state.items())
            if state and entry not in seen:
                seen.add(entry)
                waiting.append((flow.blocks[follower], follower, state, (*path, flow.blocks[follower].name)))
    raise AssertionError(f"no path for {conflict}")
